"""The teacher scores each response token once, at the row that predicts it, and never changes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tiny_models import tiny_model
from vocabtp.cache import PREFETCH_BYTES
from vocabtp.dist import GroupExchange
from vocabtp.kernels import kl_div
from vocabtp.opsd.config import TeacherConfig
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.parallel import Layout, make_layout
from vocabtp.opsd.rollout import generate
from vocabtp.opsd.teacher import Teacher

PROMPTS = [[5, 2, 6], [9], [3, 3, 3, 17, 36, 1, 0]]
OWN_PROMPTS = [[7, 7, 5, 2, 6], [11, 12, 13, 14, 15, 16, 17, 18, 9], [4]]


def some_rollout(model, ends=(2,), **changes):
    sizes = {"max_response_length": 6, "n_samples_per_prompt": 1}
    config = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, **(sizes | changes))
    specials = SimpleNamespace(eos_ids=ends, pad_id=2, vocab=37)
    return generate(model, PROMPTS, [0, 1, 2], config=config, specials=specials, seed=1, step=0)


def by_hand(module, prompts, rollout):
    """Token by token: the whole sequence without padding, row t - 1 scores token t."""
    rows = []
    for prompt, response in zip(prompts, rollout.responses(), strict=True):
        logits = module(torch.tensor([[*prompt, *response]])).logits[0]
        rows += [logits[len(prompt) + t - 1] for t in range(len(response))]
    return torch.stack(rows).detach()


def _scores(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    student = place_model(tiny_model("qwen2"), layout, name="s", trainable=True)
    # an end id that cuts one answer short
    ends = (some_rollout(student, ends=()).responses()[1][2],)
    rollout = some_rollout(student, ends=ends)
    for kind, tied in (("llama", True), ("gemma2", False), ("gpt2", True)):
        whole = tiny_model(kind, tied=tied, seed=1)
        model = place_model(tiny_model(kind, tied=tied, seed=1), layout, name="t", trainable=False)
        columns = slice(model.shard.start, model.shard.end)
        for own, payload in ((None, "logits"), (OWN_PROMPTS, "logits"), (OWN_PROMPTS, "hidden")):
            teacher = Teacher(model, student=student, payload=payload, prefetch_bytes=1234)
            expected = by_hand(whole, own or PROMPTS, rollout)[:, columns]
            with teacher.score(rollout, own) as cache:
                assert (cache.payload, cache.prefetch_bytes) == (payload, 1234)
                assert cache.row_nbytes == 4 * (32 if payload == "hidden" else model.shard.width)
                assert cache.shape == expected.shape
                assert cache.dtype == torch.float32
                scored = cache.fetch(0, expected.shape[0], shard=model.shard)
            torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="2 teacher prompts for 3 samples"):
            teacher.score(rollout, OWN_PROMPTS[:2])
    return rollout.response_lengths


def test_each_response_token_is_scored_at_the_row_before_it(ranks):
    """B29, with prompts of the teacher's own too."""
    lengths = _scores(0, 1)
    assert len(set(lengths)) > 1
    assert ranks(_scores, 2, limit=120) == [lengths] * 2


def _self_distillation(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    student = place_model(tiny_model("llama"), layout, name="s", trainable=True)
    teacher = place_model(tiny_model("llama"), layout, name="t", trainable=False)
    rollout = some_rollout(student, max_response_length=2)
    # one answer of two tokens, one of one token, as in the case
    rollout = dataclasses.replace(rollout.rows(0, 2), response_lengths=[2, 1])
    rollout.response_mask[1, -1] = False
    rollout.attention_mask[1, -1] = 0
    exchange = GroupExchange(layout.tp_group)
    out = []
    for shift in (0, 1):
        logits = student.response_logits(
            rollout.tokens, rollout.attention_mask, rollout.response_mask
        )
        with Teacher(teacher, student=student).score(rollout) as cache:
            scores = cache.fetch(0, 3).roll(shift, 0)
        loss = kl_div(logits, scores, reverse=True, exchange=exchange)
        student.module.zero_grad()
        loss.sum().backward()
        grads = [p.grad for p in student.module.parameters()]
        out.append((loss.shape[0], loss.sum().item(), max(float(g.abs().max()) for g in grads)))
    return out


def test_a_teacher_with_the_students_weights_leaves_no_loss(ranks):
    """B29: zero loss and gradient, and not so one row late."""
    for (tokens, loss, grad), (_, late_loss, late_grad) in ranks(_self_distillation, 2):
        assert tokens == 3
        assert abs(loss) < 1e-6
        assert grad < 1e-6
        assert late_loss > 0.1
        assert late_grad > 0.01


def test_a_teacher_in_training_mode_scores_without_dropout():
    """B62."""
    student = place_model(tiny_model("llama"), Layout(), name="s", trainable=True)
    noisy = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    model = place_model(tiny_model("gpt2", **noisy), Layout(), name="t", trainable=True)
    before = {k: v.clone() for k, v in model.module.state_dict().items()}
    rollout = some_rollout(student)
    teacher = Teacher(model, student=student)
    model.module.train()
    first, second = (teacher.score(rollout).fetch(0, 4) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, by_hand(tiny_model("gpt2"), PROMPTS, rollout)[:4])
    assert not any(p.requires_grad for p in model.module.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.module.state_dict().items())
    assert all(part.training for part in model.module.modules())
    assert student.module.training


def test_a_module_shared_with_the_student_keeps_learning():
    """B62's sibling: the teacher pass switches nothing of a shared module."""
    module = tiny_model("gpt2", resid_pdrop=0.5)
    student = place_model(module, Layout(), name="s", trainable=True)
    module.transformer.h[0].eval()
    modes = [part.training for part in module.modules()]
    teacher = Teacher(student, student=student, offload_to_cpu=True)
    rollout = some_rollout(student)
    first, second = (teacher.score(rollout).fetch(0, 4) for _ in range(2))
    assert torch.equal(first, second)
    assert [part.training for part in module.modules()] == modes
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("payload", ["logits", "hidden"])
def test_an_empty_rollout_leaves_an_empty_cache(payload):
    model = place_model(tiny_model("llama"), Layout(), name="t", trainable=False)
    rollout = some_rollout(model, max_response_length=0)
    teacher = Teacher(model, payload=payload)
    with teacher.score(rollout) as cache:
        assert cache.shape == cache.fetch(0, 0).shape == (0, 37)
    with teacher.score(rollout, OWN_PROMPTS) as cache:
        assert cache.shape == (0, 37)


def test_offloaded_weights_are_on_the_device_for_the_pass_only(monkeypatch):
    """The moves are recorded, not made: the order is what the option is about."""
    device = torch.device("cuda", 0)
    whole = place_model(tiny_model("llama"), Layout(), name="t", trainable=False)
    model = dataclasses.replace(whole, layout=Layout(device=device))
    rollout = some_rollout(whole)
    moves = []
    monkeypatch.setattr(model.module, "to", lambda place: moves.append(torch.device(place)))
    forward = model.module.forward
    monkeypatch.setattr(model.module, "forward", lambda **x: moves.append("pass") or forward(**x))
    teacher = Teacher(model, offload_to_cpu=True)
    cpu = torch.device("cpu")
    assert moves == [cpu]
    with teacher.score(rollout) as cache:
        expected = by_hand(tiny_model("llama"), PROMPTS, rollout)
        torch.testing.assert_close(cache.fetch(0, len(expected)), expected, rtol=1e-4, atol=1e-5)
    assert moves == [cpu, device, "pass", cpu]
    # and back when the pass fails
    monkeypatch.setattr(model.module, "forward", None)
    with pytest.raises(TypeError):
        teacher.score(rollout)
    assert moves[4:] == [device, cpu]


def test_the_default_budget_is_the_caches():
    assert TeacherConfig(model_name_or_path="t").prefetch_bytes == PREFETCH_BYTES
