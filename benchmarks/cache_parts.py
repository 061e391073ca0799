"""What the parts of cache.py share: sizes, the clock, page-locked memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: the shapes of the field, or some that a test has time for."""

    batch: int = 4
    positions: int = 2112
    chunk: int = 256  # positions of every sequence
    widths: tuple[int, ...] = (75_968, 151_936)
    rounds: int = 5
    queued: int = 4  # training steps in a row
    step_positions: int = 2048
    layers: int = 28
    student: int = 1536
    inner: int = 8960
    heads: int = 12
    hidden: tuple[int, ...] = (896, 1536, 2048, 4096, 8192)
    hidden_rows: int = 4096
    locked_rows: int = 1024
    steps: int = 1000


QUICK = Sizes(
    batch=2,
    positions=20,
    chunk=8,
    widths=(96, 128),
    rounds=1,
    queued=2,
    step_positions=16,
    layers=1,
    student=32,
    inner=48,
    heads=2,
    hidden=(16, 32),
    hidden_rows=24,
    locked_rows=32,
    steps=40,
)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def clock(call: Call, device: torch.device, times: int = 1) -> float:
    """Milliseconds of one call and all that it queued; of several in a row, their mean."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / times


def samples(
    arms: dict[str, Call],
    device: torch.device,
    rounds: int,
    times: int = 1,
    before: Call | None = None,
) -> dict[str, list[float]]:
    """What each arm took in each round, arms in turns, after a round that is not counted.

    `before` is called as often before every sample: a device at its power limit is faster for a
    while after an arm that left it idle, and so all arms come after the same.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, call in arms.items():
            if before is not None:
                clock(before, device, times)
            taken = clock(call, device, times)
            if round_:
                found[name].append(taken)
    return found


def in_turns(arms: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """The median of each arm, after one call that is not counted."""
    found = samples(arms, device, rounds)
    return {name: statistics.median(times) for name, times in found.items()}


def pinned(*shape: int) -> Tensor:
    """Page-locked bf16, where there is an accelerator to lock pages for."""
    lock = torch.accelerator.is_available()
    return torch.empty(shape, dtype=torch.bfloat16, pin_memory=lock)


def timed_row(part: str, arm: str, ms: float, nbytes: int, **more: object) -> Row:
    """One result of copying `nbytes`."""
    return {"part": part, "arm": arm, "ms": ms, "bytes": nbytes, "gb_s": nbytes / ms / 1e6, **more}
