"""Whole training runs: peak memory, seconds of each phase and tokens/s, for each way to run.

    python benchmarks/opsd.py                          # what fits one device
    python benchmarks/opsd.py --modes torch,compile    # some of it
    python benchmarks/opsd.py --ranks 2                # on two devices, sharded and cut too
    python benchmarks/opsd.py --docs docs FILE...      # tables of what was measured before

Student and teacher have the shapes of Qwen2.5 0.5B and 1.5B and random weights in bf16; the
student learns with fp32 masters. Prompts of 2048 tokens, answers of 64, four of them a rank and
step. Nothing is downloaded. Every mode is a `vocabtp-opsd train` of its own, and what is told comes
from its metrics.jsonl: medians over the steps after the first few, and the peak since the process
began. The models (4 GB) go into `--folder`, and at the end of each mode a checkpoint (7 GB, then
removed).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from results import facts

Result = dict[str, Any]

# ids of the tokenizer and columns of the head, as Qwen2.5 has them
TOKENS, VOCABULARY = 151_665, 151_936
WIDE = {"max_position_embeddings": 32_768, "rope_theta": 1e6, "num_key_value_heads": 2}
STUDENT = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    **WIDE,
}
TEACHER = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    **WIDE,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **WIDE,
}
WARM_UP = 4  # steps that no median counts: compilers and allocators settle

# ranks that a mode needs, and its overrides
MODES: dict[str, tuple[int, list[str]]] = {
    "torch": (1, []),
    "checkpointing": (1, ["training.activation_checkpointing=true"]),
    "compile": (1, ["training.compile=true"]),
    "offload": (1, ["teacher.offload_to_cpu=true"]),
    "hidden": (1, ["teacher.payload=hidden"]),
    "async": (1, ["training.async_save=true", "training.save_steps=10"]),
    "tp": (2, ["parallel.tp={ranks}"]),
    "zero2": (2, ["parallel.shard=zero2"]),
    "zero3": (2, ["parallel.shard=zero3"]),
    "deepspeed-0": (1, ["parallel.engine=deepspeed"]),
    "deepspeed-2": (1, ["parallel.engine=deepspeed", "parallel.shard=zero2"]),
    "deepspeed-2-autotp": (
        2,
        [
            *("parallel.engine=deepspeed", "parallel.shard=zero2"),
            *("parallel.tp={ranks}", "parallel.tp_by=autotp"),
        ],
    ),
    "deepspeed-2-teacher-3": (
        2,
        ["parallel.engine=deepspeed", "parallel.shard=zero2", "parallel.teacher_shard=zero3"],
    ),
}


def make_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """A letter is a token, whatever class the library reads it as; the other ids stand for none."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<unk>", "</s>", *string.ascii_lowercase]
    words += [f"word{i}" for i in range(len(words), count)]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )


def make_inputs(folder: Path, args: argparse.Namespace, device: torch.device) -> float:
    """Models, tokenizer and prompts in `folder`; the seconds that the models took."""
    began = time.perf_counter()
    tokens, columns = (200, 211) if args.quick else (TOKENS, VOCABULARY)
    tokenizer = make_tokenizer(tokens)
    for role, shape in (("student", STUDENT), ("teacher", TEACHER)):
        config = Qwen2Config(
            vocab_size=columns,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            **(TINY if args.quick else shape),
        )
        torch.manual_seed(len(role))
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        del model
    seconds = time.perf_counter() - began
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(args.steps * args.batch * args.ranks):
            letters = draw.choices(string.ascii_lowercase, k=args.prompt)
            file.write(json.dumps({"prompt": "".join(letters)}) + "\n")
    configuration = {
        "student": {"model_name_or_path": "student"},
        "teacher": {"model_name_or_path": "teacher"},
        "rollout": {
            "max_prompt_length": args.prompt,
            "max_response_length": args.answer,
            "temperature": 1.0,
        },
        "training": {
            "micro_batch_size_per_gpu": args.batch,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-5,
            "max_steps": args.steps,
            "save_steps": 0,
            "logging_steps": 5,
        },
        "data": {"path": "prompts.jsonl"},
        "parallel": {"device": device.type, "nproc": args.ranks},
    }
    (folder / "opsd.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    return seconds


def run(folder: Path, mode: str, args: argparse.Namespace) -> Result:
    """One mode's run, in a process of its own."""
    out = folder / f"out-{mode}"
    shutil.rmtree(out, ignore_errors=True)
    overrides = [text.format(ranks=args.ranks) for text in MODES[mode][1]]
    command = [sys.executable, "-m", "vocabtp.opsd", "train", str(folder / "opsd.yaml")]
    began = time.perf_counter()
    try:
        ended = subprocess.run(
            [*command, f"training.save_dir={out}", *overrides],
            capture_output=True,
            text=True,
            timeout=args.limit_s,
        )
        code, said = ended.returncode, ended.stderr + ended.stdout[-500:]
    except subprocess.TimeoutExpired:
        code, said = -1, f"not done after {args.limit_s} s"
    result: Result = {
        "mode": mode,
        "ranks": args.ranks,
        "overrides": overrides,
        "command_s": time.perf_counter() - began,
    }
    try:
        if code:
            reason = [line for line in said.splitlines() if line.strip()][-8:]
            return result | {"status": "failed", "why": reason}
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        return result | summary(rows, args)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def summary(rows: list[dict[str, Any]], args: argparse.Namespace) -> Result:
    """What the steps of a run say."""
    counted = rows[WARM_UP:] or rows[-1:]
    phases = [key.removeprefix("seconds_") for key in rows[0] if key.startswith("seconds_")]
    seconds = statistics.median(row["seconds"] for row in counted)
    answered = statistics.median(row["response_tokens"] for row in counted)
    prompts = args.prompt * args.batch * args.ranks
    return {
        "status": "ok",
        "steps": len(rows),
        "applied": sum(row["applied"] for row in rows),
        "peak_gib": max(max(row["peak_memory"]) for row in rows) / 2**30,
        "seconds": seconds,
        "seconds_by_phase": {
            name: statistics.median(row[f"seconds_{name}"] for row in counted) for name in phases
        },
        "first_step_s": rows[0]["seconds"],
        "answer_tokens_per_s": answered / seconds,
        # those that student and teacher read, prompts included
        "sequence_tokens_per_s": (answered + prompts) / seconds,
        "response_tokens": answered,
        "losses": [rows[0]["loss"], rows[-1]["loss"]],
        "grad_norms": [rows[0]["grad_norm"], rows[-1]["grad_norm"]],
    }


def line(result: Result) -> str:
    """A result in one line."""
    head = f"{result['mode']:22}"
    if result["status"] != "ok":
        return f"{head} failed: {' | '.join(result['why'])[-400:]}"
    phases = "  ".join(f"{k} {v:.3f}" for k, v in result["seconds_by_phase"].items())
    return (
        f"{head} {result['peak_gib']:6.2f} GiB  {result['seconds']:.3f} s ({phases})  "
        f"{result['answer_tokens_per_s']:.0f} answer tokens/s  "
        f"{result['sequence_tokens_per_s']:.0f} tokens/s  {result['applied']} steps applied"
    )


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("files", nargs="*", type=Path, help="measured before, for --docs")
    parser.add_argument("--docs", type=Path, help="the folder with training-runs.md")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--ranks", type=int, default=1, help="devices")
    parser.add_argument("--modes", type=lambda text: text.split(","), help=", ".join(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="prompts a rank and step")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, at most")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each mode")
    parser.add_argument("--folder", type=Path, default=Path("runs/opsd"))
    parser.add_argument("--out", type=Path, default=Path("runs/opsd.json"))
    parser.add_argument("--commit", help="where git cannot tell it")
    args = parser.parse_args(argv)
    if bool(args.files) != bool(args.docs):
        parser.error("--docs needs files that were measured before, and they need --docs")
    if args.docs:
        # matplotlib, which measuring does not need
        import opsd_docs

        opsd_docs.write(args.files, args.docs)
        return
    modes = args.modes or [mode for mode, (ranks, _) in MODES.items() if ranks <= args.ranks]
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes: no {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    device = torch.device(args.device)
    args.folder.mkdir(parents=True, exist_ok=True)
    args.folder = args.folder.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    made = make_inputs(args.folder, args, device)
    print(f"models made in {made:.1f} s", flush=True)
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()
    sizes = {name: getattr(args, name) for name in ("steps", "batch", "prompt", "answer", "quick")}
    about = facts(device, args.commit) | {"torch": torch.__version__, "models_s": made, **sizes}
    results = []
    for mode in modes:
        results.append(run(args.folder, mode, args))
        print(line(results[-1]), flush=True)
        # at once: what follows may run out of time
        args.out.write_text(json.dumps({"schema": 1, "run": about, "results": results}, indent=1))
    print(args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
