"""What this machine has, and whether two ranks on it can talk to each other."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vocabtp.opsd._console import say

_LIMIT_S = 60.0


def doctor(config: str | None, overrides: Sequence[str] = ()) -> int:
    """Prints versions, devices and backends, and tests an all_reduce of two ranks over gloo.

    Args:
        config: A configuration to check too, with its prompts; None for none.
        overrides: Its overrides.

    Returns:
        0 if all is well, 1 if the ranks cannot talk.

    Raises:
        UserError: The configuration or its prompts cannot be used.
    """
    from vocabtp.opsd.report import environment

    for name, value in environment().items():
        say(f"{name}: {value}")
    say(f"communication: {', '.join(_backends()) or 'none'}")
    if config is not None:
        _check_config(config, overrides)
    problem, seconds = two_ranks()
    if problem:
        say(f"two ranks over gloo: FAILED: {problem}")
        return 1
    say(f"two ranks over gloo: ok ({seconds:.1f} s)")
    return 0


def two_ranks(limit_s: float = _LIMIT_S) -> tuple[str, float]:
    """Starts two processes that add up a tensor; returns what went wrong ("" for nothing)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vocabtp-opsd-") as folder:
        command = [sys.executable, "-P", "-m", "vocabtp.opsd.doctor"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(Path(folder, "store"))],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        problems = []
        for number, process in enumerate(ranks):
            left = max(0.1, limit_s - (time.monotonic() - start))
            try:
                _, errors = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                problems.append(f"[rank {number}] no answer within {limit_s:.0f} s")
                continue
            if process.returncode:
                last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                problems.append(f"[rank {number}] {last}")
    return (problems[0] if problems else ""), time.monotonic() - start


def _backends() -> list[str]:
    import torch.distributed as dist

    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "xccl": dist.is_xccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, available in known.items() if available()]


def _check_config(path: str, overrides: Sequence[str]) -> None:
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.data import load_examples

    config = load_config(path, overrides)
    examples = load_examples(config.data.path, config.data)
    say(f"{path}: ok, {len(examples)} prompts")


def _rank(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    dist.init_process_group(
        "gloo",
        store=FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=_LIMIT_S / 2),
    )
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    # gloo threads sometimes abort while the interpreter shuts down, work done
    os._exit(0 if total.item() == 3 else 1)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
