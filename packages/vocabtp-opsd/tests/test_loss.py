"""The loss of one process: values, gradients, masks, chunks, and what is refused."""

import math
import weakref

import pytest
import torch
from torch.distributions import Categorical

from dense_loss import CASES, dense, logits, scale_of, value_options
from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard
from vocabtp.opsd.config import DistillationConfig
from vocabtp.opsd.loss import ROW_METRICS, distill_loss, row_metrics


@pytest.mark.parametrize("options", CASES)
def test_value_and_gradient_are_the_dense_token_mean(options):
    s, t = logits(23, 37).requires_grad_(), logits(23, 37, seed=1)
    loss = distill_loss(s, t, chunk_size=5, **options)
    truth_input = s.detach().double().requires_grad_()
    truth = dense(truth_input, t, **value_options(options)).mean() * scale_of(options)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-7)
    loss.backward()
    truth.backward()
    torch.testing.assert_close(s.grad.double(), truth_input.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", CASES[:4:3])
def test_chunk_size_is_bitwise_neutral(options):
    t = TeacherLogitCache.store(logits(41, 37, seed=1), dtype=torch.float32)
    seen = []
    for chunk in (1, 3, 16, 41, 512):
        s = logits(41, 37).requires_grad_()
        rows = []
        loss = distill_loss(s, t, chunk_size=chunk, collect=rows, **options)
        loss.backward()
        seen.append((loss, s.grad, torch.cat(rows, 1)))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    s3, t3 = logits(3, 14, 37), logits(3, 14, 37, seed=1)
    losses = {distill_loss(s3, t3, chunk_size=c, **options).item() for c in (1, 6, 9, 512)}
    assert len(losses) == 1


def test_temperature_divides_both_sides_and_a_low_precision_teacher_stays_exact():
    # B40: student-only scaling gives 0.508287
    s, t = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    plain = distill_loss(s, t, temperature=2.0, temperature_squared=False)
    assert plain.item() == pytest.approx(0.220514, abs=1e-6)
    assert distill_loss(s, t, temperature=2.0).item() == pytest.approx(0.882058, abs=1e-6)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            distill_loss(s, t, temperature=wrong)
    # B08: normalising the teacher in bf16 gives -1.29e-3
    generator = torch.Generator().manual_seed(8)
    t = (torch.randn(64, 151, generator=generator) * 6).bfloat16()
    s = t.float() + 0.02 * torch.randn(64, 151, generator=generator)
    each = dense(s, t, loss_type="jsd", beta=0.5, temperature=1.3)
    mean = distill_loss(s, t, beta=0.5, temperature=1.3).item() / 1.3**2
    assert mean == pytest.approx(1.62e-5, rel=5e-3)
    assert mean == pytest.approx(each.mean().item(), rel=1e-3)
    tokens = [
        distill_loss(s[i : i + 1], t[i : i + 1], beta=0.5, temperature=1.3) for i in range(64)
    ]
    assert min(tokens) >= -1e-7


def test_row_before_each_response_token_is_compared():
    # B29: prompt [P], responses [R1, R2] and [R1]; teacher = student
    shape = (2, 4, 11)
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]).bool()
    s = logits(*shape).requires_grad_()
    same = distill_loss(s, s.detach().clone(), mask)
    same.backward()
    assert same.item() == 0
    assert s.grad.abs().max() == 0
    assert distill_loss(s, s.detach().roll(1, dims=1), mask).item() > 0.1
    t = logits(*shape, seed=1)
    rows = [(0, 0), (0, 1), (1, 0)]  # row t - 1 scores token t
    truth = sum(dense(s[b, i], t[b, i], loss_type="reverse_kl") for b, i in rows) / 3
    s.grad = None
    loss = distill_loss(s, t, mask)
    loss.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-5)
    assert {(b, i) for b, i, _ in s.grad.nonzero().tolist()} == set(rows)
    aligned = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    assert torch.equal(distill_loss(s, t, aligned, aligned=True), loss)
    # packed rows: by the tokens' mask, by a row mask, from a cache, and without any mask
    flat_s, flat_t = s.detach()[aligned], t[aligned]
    cache = TeacherLogitCache.store(flat_t, dtype=torch.float32)
    whole = TeacherLogitCache.store(t, dtype=torch.float32)
    again = [
        distill_loss(flat_s, flat_t, mask),
        distill_loss(flat_s, cache),
        distill_loss(s, cache, mask),
        distill_loss(s, whole, mask, chunk_size=2),
        distill_loss(s, whole, mask, shard=VocabShard(0, 11, 11)),
        distill_loss(s.flatten(0, 1), t.flatten(0, 1), aligned.flatten()),
    ]
    for other in again:
        assert other.item() == pytest.approx(loss.item(), rel=1e-6)


def test_rows_that_do_not_count_cannot_spoil_the_others():
    s, t = logits(6, 9), logits(6, 9, seed=1)
    live = torch.tensor([1, 0, 1, 1, 0, 1])
    clean = s[live.bool()].clone().requires_grad_()
    s[1], t[4, 3] = float("nan"), float("-inf")
    s.requires_grad_()
    rows = []
    loss = distill_loss(s, t, live, collect=rows)
    loss.backward()
    truth = distill_loss(clean, t[live.bool()])
    truth.backward()
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(s.grad[live.bool()], clean.grad)
    assert s.grad[~live.bool()].abs().sum() == 0
    assert torch.cat(rows, 1).isfinite().all()


def test_upstream_gradient_scales_and_normalizer_replaces_the_count():
    t = logits(7, 13, seed=1)
    grads = []
    for weight, normalizer in ((1.0, 7), (0.25, 7), (1.0, 28), (1.0, torch.tensor(28.0))):
        s = logits(7, 13).requires_grad_()
        (distill_loss(s, t, normalizer=normalizer) * weight).backward()
        grads.append(s.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0] / 4, rtol=1e-6, atol=0)
    s = logits(7, 13).requires_grad_()
    loss = distill_loss(s, t)
    first = torch.autograd.grad(loss, s, torch.tensor(3.0), retain_graph=True)[0]
    (second,) = torch.autograd.grad(loss, s)
    torch.testing.assert_close(first, second * 3)
    # exactly 0 from above gives exactly 0, whatever the rows hold
    broken = torch.full((2, 5), float("nan"), requires_grad=True)
    (distill_loss(broken, logits(2, 5)) * 0.0).backward()
    assert broken.grad.abs().sum() == 0


def test_gradcheck_through_chunks():
    s = logits(5, 7).double().requires_grad_()
    t = logits(5, 7, seed=1).double()
    for options in CASES:
        assert torch.autograd.gradcheck(
            lambda x, o=options: distill_loss(x, t, chunk_size=2, **o), s
        )


def test_no_row_gives_zero_and_a_zero_gradient():
    empty = torch.zeros(0, 5, requires_grad=True)
    loss = distill_loss(empty, torch.zeros(0, 5))
    loss.backward()
    assert loss.item() == 0
    assert empty.grad.shape == (0, 5)
    s = logits(2, 3, 5).requires_grad_()
    loss = distill_loss(s, logits(2, 3, 5, seed=1), torch.zeros(2, 3, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert s.grad.abs().sum() == 0


@pytest.mark.parametrize(("budget", "most"), [(0, 1), (2, 2), (3, 2), (6, 3), (100, 3)])
def test_teacher_rows_on_the_device_are_one_chunk_and_the_budgets(monkeypatch, budget, most):
    """B44: all chunks are announced before the first is read, and each is copied once."""
    alive, seen, calls = set(), [], []
    room = TeacherLogitCache._room

    def counted(cache, key):
        out = room(cache, key)
        alive.add(key)
        calls.append(key[:2])
        weakref.finalize(out, alive.discard, key)
        seen.append(len(alive))
        return out

    monkeypatch.setattr(TeacherLogitCache, "_room", counted)
    cache = TeacherLogitCache.store(logits(7, 5, seed=1), prefetch_bytes=budget * 10)
    s = logits(7, 5).requires_grad_()
    loss = distill_loss(s, cache, chunk_size=3)
    assert calls == [(0, 3), (3, 6), (6, 7)]
    assert max(seen) == most
    assert not alive
    # backward needs no teacher any more
    cache.free()
    loss.backward()
    assert s.grad.isfinite().all()
    assert len(calls) == 3


def test_row_metrics_are_those_of_the_distributions():
    s, t = logits(19, 37), logits(19, 37, seed=1)
    found = dict(zip(ROW_METRICS, row_metrics(s, t), strict=True))
    truth = {
        "reverse_kl": dense(s, t, loss_type="reverse_kl"),
        "forward_kl": dense(s, t, loss_type="forward_kl"),
        "student_entropy": Categorical(logits=s.double()).entropy(),
        "teacher_entropy": Categorical(logits=t.double()).entropy(),
        "top1_agreement": (s.argmax(-1) == t.argmax(-1)).double(),
    }
    for name, value in truth.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


def test_configuration_decides_and_overrides_replace():
    s, t = logits(5, 7), logits(5, 7, seed=1)
    config = DistillationConfig(
        loss_type="jsd", beta=0.2, temperature=1.5, temperature_squared=False
    )
    by_hand = distill_loss(
        s, t, loss_type="jsd", beta=0.2, temperature=1.5, temperature_squared=False
    )
    assert torch.equal(distill_loss(s, t, None, config), by_hand)
    changed = distill_loss(s, t, None, config, beta=0.7)
    assert not torch.equal(changed, by_hand)
    assert torch.equal(distill_loss(s, t), distill_loss(s, t, None, DistillationConfig()))
    # beta alone means jsd
    assert torch.equal(distill_loss(s, t, beta=0.2), distill_loss(s, t, loss_type="jsd", beta=0.2))


def refused():
    s, t = logits(2, 4, 5), logits(2, 4, 5, seed=1)
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])
    shard = VocabShard(0, 5, 12)
    return [
        (ValueError, "first token", lambda: distill_loss(s, t, mask.flip(1).roll(-1, 1))),
        (TypeError, "bool or integer", lambda: distill_loss(s, t, mask.float())),
        (ValueError, "response_mask must be", lambda: distill_loss(s, t, mask[:, :3])),
        (ValueError, "same rows", lambda: distill_loss(s, t[:, :3], mask)),
        (ValueError, "same rows", lambda: distill_loss(s, t[0], mask)),
        (ValueError, "marks 3", lambda: distill_loss(s[0], t[0], mask)),
        (ValueError, r"\[rows, L\]", lambda: distill_loss(s[0, 0], t[0, 0])),
        (ValueError, "beta", lambda: distill_loss(s, t, loss_type="reverse_kl", beta=0.3)),
        (ValueError, "beta", lambda: distill_loss(s, t, beta=1.5)),
        (ValueError, "loss_type", lambda: distill_loss(s, t, loss_type="kl")),
        (ValueError, "chunk_size", lambda: distill_loss(s, t, chunk_size=0)),
        (TypeError, "tempreature", lambda: distill_loss(s, t, tempreature=2)),
        (ValueError, "whole heads", lambda: distill_loss(s, t, shard=shard, loss_backend="dense")),
        (ValueError, "columns", lambda: distill_loss(s, t, shard=VocabShard(0, 6, 12))),
    ]


@pytest.mark.parametrize("case", range(14))
def test_what_cannot_be_meant_is_refused(case):
    kind, text, call = refused()[case]
    with pytest.raises(kind, match=text) as caught:
        call()
    assert "distill_loss" in str(caught.value) or text == "beta"


def test_cache_of_another_shard_is_refused():
    cache = TeacherLogitCache.store(logits(3, 5), shard=VocabShard(5, 10, 10))
    with pytest.raises(ValueError, match="another shard"):
        distill_loss(logits(3, 5), cache, shard=VocabShard(0, 5, 10))
    # a softmax over half the vocabulary would pass for a distribution
    with pytest.raises(ValueError, match="columns 5 to 10 of 10"):
        distill_loss(logits(3, 5), cache)
    whole = TeacherLogitCache.store(logits(3, 5), VocabShard(0, 5, 5), torch.float32)
    assert torch.equal(distill_loss(logits(3, 5), whole), distill_loss(logits(3, 5), logits(3, 5)))
