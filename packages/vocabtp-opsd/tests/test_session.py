"""What a run reads before its models: tokenizers as configured, end tokens, lengths."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig

from tiny_run import tiny_run, tiny_tokenizer
from vocabtp.opsd import session
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError, ModelError
from vocabtp.opsd.evaluate import Evaluation
from vocabtp.opsd.output import Output
from vocabtp.opsd.parallel import Layout, make_layout
from vocabtp.opsd.report import Summary
from vocabtp.opsd.rollout import Rollout
from vocabtp.opsd.session import read_inputs, read_models


def loaded(config, layout=None):
    """The models of a training run."""
    layout = layout or Layout()
    inputs = read_inputs(config, layout)
    return read_models(config, layout, inputs.tokenizer, inputs.train, inputs.held_out)


def test_tokenizers_run_remote_code_only_for_the_model_that_allows_it(tmp_path, monkeypatch):
    path = tiny_run(tmp_path, teacher={"trust_remote_code": True})
    seen = {}
    real = session.load_tokenizer

    def load(name, *, trust_remote_code=False):
        seen[name.rpartition("/")[2]] = trust_remote_code
        return real(name, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(session, "load_tokenizer", load)
    read_inputs(load_config(path), Layout())
    assert seen == {"student": False, "teacher": True}


def test_the_generation_configuration_may_name_the_only_end_token(tmp_path):
    path = tiny_run(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    for role in ("student", "teacher"):
        tokenizer.save_pretrained(tmp_path / role)
        GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path / role)
    config = load_config(path)
    assert loaded(config).specials.eos_ids == (2, 7)
    (tmp_path / "student" / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="names an end token"):
        read_inputs(config, Layout())


def test_the_teachers_own_prompts_must_fit_its_context(tmp_path):
    """The tiny models' context is 64: prompt and hint of 59 and an answer of 6 are one too many."""
    path = tiny_run(tmp_path, teacher={"prompt_template": "{prompt}{hint}"}, held_out=1)
    for name in ("train.jsonl", "held_out.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        size = 59 if name == "held_out.jsonl" else 58
        text = [
            json.dumps(row | {"hint": "a" * (size - len(row["prompt"]))}) + "\n" for row in rows
        ]
        (tmp_path / name).write_text("".join(text))
    config = load_config(path)
    with pytest.raises(ModelError, match=r"up to 59 tokens and an answer can have 6, .* is 64"):
        loaded(config)
    shorter = load_config(path, ["rollout.max_response_length=5"])
    loaded(shorter)


def test_the_report_pairs_answers_to_the_same_prompt(tmp_path):
    """A run that resumed on other ranks has other samples after than before."""

    def found(*prompts):
        rows = [{"prompt": p, "response": p + "?", "answer": p + "!"} for p in prompts]
        return Evaluation(
            exact_match=0.0,
            reverse_kl=0.0,
            examples=2,
            response_length=1.0,
            truncated=0.0,
            samples=rows,
        )

    config = load_config(tiny_run(tmp_path))
    summary = Summary(
        steps=1,
        skipped_steps=0,
        seconds=1.0,
        exact_match=(0.0, 0.0),
        reverse_kl=(0.0, 0.0),
        tokens_per_s=1.0,
        peak_memory=[1],
    )
    with Output(config, is_main=True, total=1, done=0) as output:
        path = output.finish(summary, found("p0", "p2", "p4"), found("p0", "p4", "p8"))
    text = path.read_text(encoding="utf-8")
    assert all(f"{p}!" in text for p in ("p0", "p4"))
    assert not any(p in text for p in ("p2", "p8"))


def limited(root, pinned_bytes, payload, *, longest=600, tp=1):
    """Two answers at a time; a token has 37 logits or 24 numbers of hidden states, in float32."""
    return load_config(
        tiny_run(
            root,
            teacher={"pinned_bytes": pinned_bytes, "payload": payload},
            rollout={"max_prompt_length": 16, "max_response_length": longest},
            training={"micro_batch_size_per_gpu": 2},
            parallel={"device": "cpu", "tp": tp},
        )
    )


@pytest.mark.parametrize(("payload", "width"), [("logits", 37), ("hidden", 24)])
def test_the_payloads_limit_is_the_pools_and_as_tight(tmp_path, payload, width):
    """Answers end at the student's context of 64: 2 of 63 tokens fill whole pages of a pool."""
    need = -(-2 * 63 * width * 4 // 4096) * 4096
    config = limited(tmp_path, need, payload)
    models = loaded(config)
    ids = torch.zeros((2, 64), dtype=torch.long)
    inside = torch.ones_like(ids, dtype=torch.bool)
    inside[:, 0] = False
    longest = Rollout(
        tokens=ids,
        attention_mask=torch.ones_like(ids),
        response_mask=inside,
        prompt_lengths=[1, 1],
        response_lengths=[63, 63],
        truncated=[True, True],
        sample_ids=[0, 1],
    )
    with models.teacher.score(longest) as cache:
        assert len(cache) == 126
        with pytest.raises(ValueError, match=f"and the limit is {need}"):
            models.teacher.score(longest)
    less = limited(tmp_path / "less", need - 1, payload)
    told = (
        rf"teacher\.pinned_bytes is {need - 1}, but the {payload} of 2 .* 63 tokens take {need} b"
    )
    with pytest.raises(ConfigError, match=told):
        loaded(less)


def _told(rank, world, root):
    """What this rank is told, and what its longest payload takes."""
    config = load_config(root / "opsd.yaml")
    layout = make_layout(config.parallel)
    try:
        models = loaded(config, layout)
    except ConfigError as error:
        return str(error)
    return models.teacher.payload_nbytes(112)


def test_a_limit_that_one_rank_passes_stops_all(tmp_path, ranks):
    """Of 37 ids rank 0 has 19 and rank 1 has 18: the rows of 112 tokens are 3 and 2 pages."""
    limited(tmp_path, 3 * 4096, "logits", longest=56, tp=2)
    assert ranks(_told, 2, tmp_path) == [8512, 8064]
    limited(tmp_path / "less", 2 * 4096, "logits", longest=56, tp=2)
    first, second = ranks(_told, 2, tmp_path / "less")
    assert first == second
    assert first.startswith("teacher.pinned_bytes is 8192, but the logits of 2 answer(s) of up to")
