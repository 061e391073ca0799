"""A whole distillation run of a few thousand weights in a directory: models, tokenizer, data."""

from __future__ import annotations

import contextlib
import json
import string
from pathlib import Path
from typing import Any

import yaml

# 3 special ids and 34 characters: 37, which neither 2 nor 3 nor 4 divides
CHARACTERS = string.digits + "+=" + string.ascii_lowercase[:22]


def tiny_tokenizer():
    """One token a character; `</s>` (id 2) ends a text and `<pad>` (id 0) pads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<unk>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )


def tiny_run(
    root: Path,
    *,
    kind: str = "qwen2",
    tied: bool = False,
    prompts: int = 12,
    held_out: int = 0,
    model: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Path:
    """Write models, data and a configuration; the configuration's path.

    Six attention heads over a hidden size of 24, so that 1, 2 and 3 ranks can share a model.
    `sections` are merged into the configuration.
    """
    from tiny_models import tiny_model

    root.mkdir(parents=True, exist_ok=True)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 30,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 4,
    } | (model or {})
    tokenizer = tiny_tokenizer()
    for seed, role in enumerate(("student", "teacher")):
        tiny_model(kind, seed=seed, tied=tied, vocab=len(tokenizer), **sizes).save_pretrained(
            root / role
        )
        tokenizer.save_pretrained(root / role)
    rows = [{"prompt": f"{7 * i % 50}+{i}=", "answer": str(7 * i % 50 + i)} for i in range(60)]
    _jsonl(root / "train.jsonl", rows[:prompts])
    _jsonl(root / "held_out.jsonl", rows[-max(1, held_out) :])
    config: dict[str, dict[str, Any]] = {
        "student": {"model_name_or_path": "student", "dtype": "float32"},
        "teacher": {"model_name_or_path": "teacher", "dtype": "float32"},
        "rollout": {"max_prompt_length": 16, "max_response_length": 6},
        "training": {
            "train_batch_size": 4,
            "learning_rate": 0.01,
            "adam_eps": 1e-3,
            "max_steps": 3,
            "save_steps": 0,
            "save_dir": str(root / "out"),
        },
        "data": {"path": "train.jsonl"},
        "parallel": {"device": "cpu"},
    }
    if held_out:
        config["data"]["eval_path"] = "held_out.jsonl"
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    path = root / "opsd.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recorded(path: Path, *overrides: str, report: bool = False) -> dict[str, Any]:
    """Train and tell everything: rollouts and metrics of each step, weights, optimizer state.

    Every rank of a run calls it; weights and state come back whole, on all ranks alike. Drawing
    the report takes longer than such a run, so it is left out by default.
    """
    import vocabtp.opsd.output as output_module
    import vocabtp.opsd.run as run_module
    import vocabtp.opsd.step as step_module
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.trainer import Trainer

    rollouts, reports, weights = [], [], []
    generate, stepper = step_module.generate, run_module.Stepper
    write_report = output_module.write_report
    if not report:
        output_module.write_report = lambda folder, **_: folder / "report.html"

    def watched(*args, **options):
        rollout = generate(*args, **options)
        rollouts.append((options["step"], rollout.sample_ids, rollout))
        return rollout

    class Watched(stepper):
        def run(self, step, *stopping):
            before = whole(named_parameters(self.models.student.module))
            report = super().run(step, *stopping)
            after = whole(named_parameters(self.models.student.module))
            weights.append({name: not before[name].equal(after[name]) for name in before})
            reports.append(report)
            return report

    step_module.generate, run_module.Stepper = watched, Watched
    try:
        trainer = Trainer(load_config(path, overrides))
        engines = []
        trainer_engine = trainer._engine
        trainer._engine = lambda: engines.append(trainer_engine()) or engines[-1]
        result = trainer.train()
    finally:
        step_module.generate, run_module.Stepper = generate, stepper
        output_module.write_report = write_report
    return {
        "rollouts": rollouts,
        "answers": [
            (step, sample, answer)
            for step, ids, rollout in rollouts
            for sample, answer in zip(ids, rollout.responses(), strict=True)
        ],
        "losses": [report.metrics["loss"] for report in reports],
        "metrics": [report.metrics for report in reports],
        "applied": [report.result.applied for report in reports],
        "changed": weights,
        "result": result,
        "weights": whole(named_parameters(trainer.models.student.module)),
        "teacher": whole(named_parameters(trainer.models.teacher.model.module)),
        "teacher_stored": [
            sum(part(p).numel() for p in trainer.models.teacher.model.module.parameters())
            for part in (lambda p: p, lambda p: getattr(p, "ds_tensor", p))
        ],
        # modules that DeepSpeed gathers the weights of others for, and keeps them longer
        "teacher_kept": [
            name
            for name, part in trainer.models.teacher.model.module.named_modules()
            if getattr(part, "_external_params", None)
        ],
        "optimizer": whole(engines[0].state_tensors().items()),
        "parameters": len(engines[0].slots),
        "tied": trainer.models.student.tied,
    }


def named_parameters(module):
    """The parameters, those that an engine made plain as DTensors again."""
    from vocabtp.opsd.engine.places import wrapped

    with contextlib.ExitStack() as stack:
        if partitioned := [p for p in module.parameters() if hasattr(p, "ds_id")]:
            from deepspeed.runtime.zero import GatheredParameters

            stack.enter_context(GatheredParameters(partitioned))
        return [(name, wrapped(p, p.detach().clone())) for name, p in module.named_parameters()]


def whole(named) -> dict[str, Any]:
    """Tensors by name, gathered from their shards, as copies."""
    out = {}
    for name, tensor in named:
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        out[name] = tensor.clone()
    return out


def same(a, b) -> bool:
    """Whether tensors by name are equal, of which both have all."""
    assert a.keys() == b.keys()
    return all(a[name].equal(b[name]) for name in a)


def logged(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_s", "peak")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
