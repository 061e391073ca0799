"""Models from disk: what is refused before weights load, strict files, heads of one width."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import tiny_config, tiny_model
from vocabtp.opsd import model_files
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.loading import load_model, load_models
from vocabtp.opsd.parallel import Layout, make_layout


def save(path, kind="llama", **changes):
    tiny_model(kind, **changes).save_pretrained(path)
    return path


def config_for(root, student, teacher, *overrides):
    (root / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    text = f"""
student: {{model_name_or_path: "{student}", dtype: float32}}
teacher: {{model_name_or_path: "{teacher}", dtype: float32}}
data: {{path: "{root / "prompts.jsonl"}"}}
rollout: {{max_prompt_length: 16, max_response_length: 16}}
parallel: {{device: cpu}}
"""
    (root / "opsd.yaml").write_text(text)
    return load_config(root / "opsd.yaml", overrides)


@pytest.fixture
def no_weights(monkeypatch):
    def refuse(*_args):
        raise AssertionError("weights were read")

    monkeypatch.setattr("vocabtp.opsd.loading.read_model", refuse)
    monkeypatch.setattr("vocabtp.opsd.loading.read_skeleton", refuse)


def test_student_trains_and_teacher_is_frozen(tmp_path):
    config = config_for(tmp_path, save(tmp_path / "s"), save(tmp_path / "t", seed=1))
    student, teacher = load_models(config, Layout(), 37)
    assert student.module.training
    assert all(p.requires_grad for p in student.module.parameters())
    assert not any(part.training for part in teacher.module.modules())
    assert not any(p.requires_grad for p in teacher.module.parameters())
    assert (student.shard.start, student.shard.end, student.shard.tp_group) == (0, 37, None)
    truth = tiny_model("llama", seed=1).state_dict()
    assert all(torch.equal(v, truth[k]) for k, v in teacher.module.state_dict().items())


def test_different_head_widths_are_refused_by_name_before_weights_load(tmp_path, no_weights):
    """B25."""
    student, teacher = save(tmp_path / "s", vocab=40), save(tmp_path / "t", vocab=44)
    with pytest.raises(ModelError) as caught:
        load_models(config_for(tmp_path, student, teacher), Layout(), 37)
    text = str(caught.value)
    assert all(part in text for part in ("40", "44", "37", "distillation.vocab", "common"))
    assert "\n" not in text


@pytest.mark.parametrize("tied", [False, True])
def test_common_vocabulary_keeps_the_tokenizers_ids(tmp_path, tied):
    student = save(tmp_path / "s", vocab=40, tied=tied)
    teacher = save(tmp_path / "t", "gpt2", vocab=44, tied=not tied)
    config = config_for(tmp_path, student, teacher, "distillation.vocab=common")
    pair = load_models(config, Layout(), 37)
    for model, kind, vocab, is_tied in zip(
        pair, ("llama", "gpt2"), (40, 44), (tied, not tied), strict=True
    ):
        assert model.shard.global_size == 37
        assert model.tied == is_tied
        tokens = torch.tensor([[3, 1, 4, 36]])
        truth = tiny_model(kind, vocab=vocab, tied=is_tied)(tokens).logits[0, :3, :37]
        ones, mask = torch.ones_like(tokens), torch.tensor([[False, True, True, True]])
        actual = model.response_logits(tokens, ones, mask)
        torch.testing.assert_close(actual, truth, rtol=1e-5, atol=1e-5)
        model.module.save_pretrained(tmp_path / "again")
        assert tiny_like(tmp_path / "again").get_output_embeddings().weight.shape[0] == 37


def tiny_like(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_a_head_narrower_than_the_tokenizer_is_refused(tmp_path, no_weights):
    both = save(tmp_path / "m")
    for vocab in ("own", "common"):
        config = config_for(tmp_path, both, both, f"distillation.vocab={vocab}")
        with pytest.raises(ModelError, match=r"head has 37 columns, but the tokenizer has 38 ids"):
            load_models(config, Layout(), 38)


def test_missing_models_are_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = config_for(tmp_path, *[save(tmp_path / "m")] * 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "no-such-type"}')
    for bad, reason in (
        (tmp_path / "nowhere", "there is no directory"),
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "odd", "cannot read its configuration"),
        (tmp_path / "prompts.jsonl", "there is no directory"),
        ("vocabtp-tests/no-such-model", "cannot read its configuration"),
    ):
        for role in ("student", "teacher"):
            section = getattr(config, role).model_copy(update={"model_name_or_path": str(bad)})
            with pytest.raises(ModelError) as caught:
                load_models(config.model_copy(update={role: section}), Layout(), 37)
            text = str(caught.value)
            assert role in text
            assert reason in text
            assert str(bad) in text
            assert "\n" not in text


def damage(path, what):
    file = path / "model.safetensors"
    state = load_file(file)
    key = "model.layers.1.mlp.up_proj.weight"
    if what == "missing":
        del state[key]
    elif what == "unexpected":
        state["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    elif what == "shape":
        state[key] = state[key][:-1].clone()
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif what == "pickle":
        file.unlink()
        torch.save(state, path / "pytorch_model.bin")
    else:
        save_file(state, file, {"format": "pt"})
    return "up_proj" if what in ("missing", "shape") else ""


@pytest.mark.parametrize("what", ["missing", "unexpected", "shape", "truncated", "pickle"])
def test_files_must_hold_exactly_the_models_weights(tmp_path, what):
    config = config_for(tmp_path, save(tmp_path / "s"), save(tmp_path / "t"))
    shown = damage(tmp_path / "t", what)
    with pytest.raises(ModelError, match="teacher") as caught:
        load_model(config.teacher, Layout(), trainable=False)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_must_hold_prompt_and_answer(tmp_path, no_weights):
    long, short = save(tmp_path / "l"), save(tmp_path / "s", max_position_embeddings=20)
    with pytest.raises(ModelError, match=r"32 tokens, but the teacher's context is 20"):
        load_models(config_for(tmp_path, long, short), Layout(), 37)
    config = config_for(tmp_path, short, long, "rollout.max_prompt_length=21")
    with pytest.raises(ModelError, match=r"max_prompt_length is 21, but the student's .* 20"):
        load_models(config, Layout(), 37)
    config = config_for(tmp_path, long, long)
    with pytest.raises(ModelError, match=r"up to 49 tokens and an answer can have 16, .* is 64"):
        load_models(config, Layout(), 37, teacher_prompt=49)
    with pytest.raises(AssertionError, match="weights were read"):
        load_models(config, Layout(), 37, teacher_prompt=48)


LAYOUT_CASES = [
    ("llama", {"num_key_value_heads": 1}, 2, True, r"does not divide its 1 key-value heads"),
    ("llama", {}, 3, True, r"does not divide its 4 attention heads"),
    ("phi3", {"pad_token_id": 0}, 2, True, r"'rowwise_split_input' on model\.layers\.0"),
    ("gpt2", {"vocab": 5}, 4, True, r"size 5 over parallel\.tp 4"),
    ("llama", {"num_key_value_heads": 4, "intermediate_size": 5}, 4, False, r"mlp\.\w+ of size 5"),
    ("mixtral", {}, 2, True, r"tensor-parallel plan asks for '\w+' on"),
    ("phi", {"qk_layernorm": True}, 2, True, r"layers beside model\.layers\.0\..*q_layernorm\.wei"),
    ("apertus", {}, 2, False, r"beside model\.layers\.0\.mlp\.act_fn\.alpha_p, but does not say"),
]


@pytest.mark.parametrize(("kind", "changes", "tp", "cut", "message"), LAYOUT_CASES)
def test_layouts_that_do_not_fit_are_refused_before_weights_load(
    tmp_path, kind, changes, tp, cut, message
):
    section = config_for(tmp_path, "a", "b").student
    config = tiny_config(kind, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        model_files.check_layout(section, config, "student", tp, cut, "plan")
    assert "parallel.tp" in str(caught.value)
    model_files.check_layout(section, config, "student", 1, cut, "plan")


def test_a_pair_without_a_plan_needs_no_head_count(tmp_path):
    section = config_for(tmp_path, "a", "b").student
    # gpt2 keeps its backbone whole, so 4 heads over 3 ranks are fine
    model_files.check_layout(section, tiny_config("gpt2"), "student", 3, True, "plan")


def _pair_at_tp2(rank, world, root):
    place = root / f"rank{rank}"
    place.mkdir()

    def config(student, teacher, *overrides):
        return config_for(place, root / student, root / teacher, f"parallel.tp={world}", *overrides)

    plain = config("a", "b")
    layout = make_layout(plain.parallel)
    tokens = torch.tensor([[3, 1, 4, 36, 2]])
    response = torch.tensor([[False, False, True, True, True]])
    out = {}
    for name, wanted in (
        ("cut", plain),
        ("whole", config("a", "b", "distillation.loss_backend=dense")),
        ("common", config("a", "c", "distillation.vocab=common")),
    ):
        pair = load_models(wanted, layout, 37)
        assert pair[0].shard == pair[1].shard
        ones = torch.ones_like(tokens)
        logits = [m.response_logits(tokens, ones, response).detach() for m in pair]
        out[name] = (pair[0].shard.start, pair[0].shard.end, logits)
        assert not any(p.requires_grad for p in pair[1].module.parameters())
        assert not any(part.training for part in pair[1].module.modules())
    messages = []
    # on rank 1 alone: a file that only its machine lacks
    lone = config("a", "a").teacher
    if rank == 1:
        lone = lone.model_copy(update={"model_name_or_path": str(root / "gone")})
    for wanted in (
        config("a", "c"),
        plain.model_copy(update={"teacher": lone}),
        config("a", "odd"),
    ):
        with pytest.raises(ModelError) as caught:
            load_models(wanted, layout, 37)
        messages.append(str(caught.value))
    return out, messages


def test_pairs_load_at_tp2_and_no_rank_fails_alone(tmp_path, ranks):
    """B25 too: every rank stops with the message."""
    save(tmp_path / "a", "qwen3", tied=True)
    save(tmp_path / "b", seed=1)
    save(tmp_path / "c", seed=1, vocab=44)
    save(tmp_path / "odd", num_key_value_heads=1)
    (first, text), (second, other) = ranks(_pair_at_tp2, 2, tmp_path, limit=120)
    assert text == other
    assert "columns" in text[0]
    assert "there is no directory" in text[1]
    assert "does not divide its 1 key-value heads" in text[2]
    tokens = torch.tensor([[3, 1, 4, 36, 2]])
    truth = {}
    for name, kind, options in (
        ("a", "qwen3", {"tied": True}),
        ("b", "llama", {"seed": 1}),
        ("c", "llama", {"seed": 1, "vocab": 44}),
    ):
        truth[name] = tiny_model(kind, **options)(tokens).logits[0, 1:4, :37]
    for name, teacher in (("cut", "b"), ("whole", "b"), ("common", "c")):
        (start, end, left), (_, last, right) = first[name], second[name]
        assert (start, end, last) == ((0, 37, 37) if name == "whole" else (0, 19, 37))
        for side, model in enumerate(("a", teacher)):
            both = left[side] if name == "whole" else torch.cat([left[side], right[side]], 1)
            torch.testing.assert_close(both, truth[model], rtol=1e-4, atol=1e-5)
