"""What a run reads before its models: tokenizers as configured, end tokens, lengths."""

from __future__ import annotations

import json

import pytest
from transformers import GenerationConfig

from tiny_run import tiny_run, tiny_tokenizer
from vocabtp.opsd import session
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.evaluate import Evaluation
from vocabtp.opsd.output import Output
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.report import Summary
from vocabtp.opsd.session import read_inputs, read_models


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
    inputs = read_inputs(config, Layout())
    assert read_models(config, Layout(), inputs).specials.eos_ids == (2, 7)
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
        read_models(config, Layout(), read_inputs(config, Layout()))
    shorter = load_config(path, ["rollout.max_response_length=5"])
    read_models(shorter, Layout(), read_inputs(shorter, Layout()))


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
