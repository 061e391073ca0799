"""The tables of docs/training-runs.md from files that benchmarks/opsd.py wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plot import fill

_HEAD = (
    *("mode", "ranks", "peak GiB a rank", "s a step"),
    *("rollout", "teacher", "student", "optimizer"),
    *("answer tokens/s", "tokens/s"),
)
_MEANS = {
    "torch": "torch engine",
    "checkpointing": "torch engine, `training.activation_checkpointing`",
    "compile": "torch engine, `training.compile`",
    "offload": "torch engine, `teacher.offload_to_cpu`",
    "hidden": "torch engine, `teacher.payload: hidden`",
    "async": "torch engine, `training.async_save`",
    "tp": "torch engine, `parallel.tp: 2`",
    "zero2": "torch engine, `parallel.shard: zero2`",
    "zero3": "torch engine, `parallel.shard: zero3`",
    "deepspeed-0": "DeepSpeed, ZeRO-0",
    "deepspeed-2": "DeepSpeed, ZeRO-2",
    "deepspeed-2-autotp": "DeepSpeed, ZeRO-2, AutoTP over 2",
    "deepspeed-2-teacher-3": "DeepSpeed, ZeRO-2, teacher ZeRO-3",
}


def write(paths: Sequence[Path], docs: Path) -> None:
    """Write the tables into DOCS/training-runs.md."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    page = docs / "training-runs.md"
    made = {"runs": "\n\n".join(map(_part, files))}
    page.write_text(fill(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(f"wrote {page}")


def _part(file: dict[str, Any]) -> str:
    run = file["run"]
    commit = (run["commit"] or "unknown")[:10]
    head = f"{run['device']}, torch {run['torch']}, commit {commit}, {run['date'][:10]}."
    return f"{head} {run['steps']} updates each.\n\n{_table(file['results'])}"


def _table(results: Sequence[dict[str, Any]]) -> str:
    lines = [_HEAD, ("---",) + ("---:",) * (len(_HEAD) - 1)]
    for result in results:
        name = _MEANS.get(result["mode"], result["mode"])
        if result["status"] != "ok":
            lines.append((name, str(result["ranks"]), *[result["status"]] * (len(_HEAD) - 2)))
            continue
        phases = result["seconds_by_phase"]
        lines.append(
            (
                name,
                str(result["ranks"]),
                f"{result['peak_gib']:.1f}",
                f"{result['seconds']:.2f}",
                *(f"{phases[key]:.3f}" for key in ("rollout", "teacher", "student", "step")),
                f"{result['answer_tokens_per_s']:.0f}",
                f"{result['sequence_tokens_per_s']:.0f}",
            )
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
