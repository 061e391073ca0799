"""What `rollout` and `eval` need, what they leave alone, and that the answers stay the same."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from tiny_models import tiny_model
from tiny_run import tiny_run, tiny_tokenizer
from vocabtp.opsd import cli, trainer
from vocabtp.opsd.config import load_config
from vocabtp.opsd.trainer import Trainer

# what only other commands use, and a value that `check` refuses
UNUSED = {
    "held out": "data.eval_path=missing.jsonl",
    "teacher": "teacher.model_name_or_path=/no/such/teacher",
    "teacher's context": "teacher.model_name_or_path=short",
    "teacher's prompts": 'teacher.prompt_template="{prompt}{hint}"',
    "payload": "teacher.pinned_bytes=1",
}
# what would go wrong in the middle of the answers
NEEDED = {
    "prompts": ("data.path=missing.jsonl", "cannot read the prompts"),
    "lengths": ("rollout.max_prompt_length=65", "student's context is 64 tokens"),
    "head": ("student.model_name_or_path=narrow", "its head has 36 columns"),
}
# what scores the answers to held-out prompts, and how far it reaches
SCORING = {
    "teacher": ("teacher.model_name_or_path=/no/such/teacher", "/no/such/teacher"),
    "teacher's context": ("teacher.model_name_or_path=short", "teacher's context is 16"),
    "payload": ("teacher.pinned_bytes=1", "teacher.pinned_bytes is 1"),
    "lengths": NEEDED["lengths"],
}


def no_report(folder, **_):
    return folder / "report.html"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the common ids of two widths; what its own trainer answers and finds at the end.

    A prompt that is too long stands among the others, so that lines are not sample ids. Several
    ids end an answer, as the model's files say.
    """
    root = tmp_path_factory.mktemp("run")
    path = tiny_run(
        root,
        held_out=3,
        distillation={"vocab": "common"},
        rollout={"temperature": 1.0, "top_k": 20},
        training={"max_steps": 1, "micro_batch_size_per_gpu": 2},
        data={"on_error": "skip"},
    )
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 6}
    sizes |= {"hidden_size": 24, "head_dim": 4, "attention_dropout": 0.1}
    models = {"student": (40, 64), "teacher": (44, 64), "narrow": (36, 64), "short": (44, 16)}
    for seed, (name, (vocab, context)) in enumerate(models.items()):
        model = tiny_model(
            "qwen2", seed=seed, vocab=vocab, max_position_embeddings=context, **sizes
        )
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
        GenerationConfig(eos_token_id=[2, *range(20, 28)]).save_pretrained(root / name)
    rows = (root / "train.jsonl").read_text().splitlines()
    rows.insert(2, json.dumps({"prompt": "1" * 17}))
    (root / "train.jsonl").write_text("\n".join(rows))
    own = Trainer(load_config(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vocabtp.opsd.output.write_report", no_report)
        own.train()
        for name in ("read_prompts", "read_answerer", "read_held_out", "read_models"):
            # what it has read for training serves
            patch.delattr(trainer, name)
        own.rollout(root / "answers.jsonl")
        found = own.evaluate()
    return SimpleNamespace(path=path, answers=(root / "answers.jsonl").read_bytes(), found=found)


def test_the_answers_are_varied(trained):
    """Or the same answers again would say little."""
    rows = [json.loads(line) for line in trained.answers.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, *range(4, 14)]
    assert len({row["response"] for row in rows}) > 8
    assert {row["truncated"] for row in rows} == {True, False}


@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED)
def test_what_rollout_does_not_use_is_not_judged(trained, tmp_path, unused):
    target = tmp_path / "answers.jsonl"
    assert cli.run(["check", str(trained.path), unused]) == 2
    assert cli.run(["rollout", str(trained.path), "--output", str(target), unused]) == 0
    assert target.read_bytes() == trained.answers


def answers_of_ranks(rank, world, path, target, overrides):
    overrides = [*overrides, UNUSED["teacher"]]
    Trainer(load_config(path, overrides, teacher=False)).rollout(target)


@pytest.mark.parametrize(
    "overrides", [["parallel.tp=2"], ["parallel.shard=zero3"]], ids=["tp", "zero3"]
)
def test_ranks_answer_alike_without_a_teacher(ranks, trained, tmp_path, overrides):
    ranks(answers_of_ranks, 2, trained.path, tmp_path / "answers.jsonl", overrides)
    assert (tmp_path / "answers.jsonl").read_bytes() == trained.answers


@pytest.mark.parametrize(("needed", "words"), NEEDED.values(), ids=NEEDED)
def test_rollout_refuses_what_cannot_be_answered(trained, tmp_path, capsys, needed, words):
    path = str(trained.path)
    assert cli.run(["rollout", path, "--output", str(tmp_path / "answers.jsonl"), needed]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_eval_needs_no_training_prompts(trained):
    missing = "data.path=missing.jsonl"
    assert cli.run(["check", str(trained.path), missing]) == 2
    assert cli.run(["eval", str(trained.path), missing]) == 0
    assert Trainer(load_config(trained.path, [missing])).evaluate() == trained.found


@pytest.mark.parametrize(("needed", "words"), SCORING.values(), ids=SCORING)
def test_eval_refuses_what_cannot_be_scored(trained, capsys, needed, words):
    assert cli.run(["eval", str(trained.path), needed]) == 2
    assert words in capsys.readouterr().err
