"""How long: device time by CUDA graphs or events, in turns, so that a slow moment falls on all.

A launch is one call on each of an arm's input sets. On CUDA it is recorded once as a graph and
replayed; an arm that cannot be recorded is launched as it is. Either way a spin kernel runs first
while the host queues the launches between two events, so that what is timed is the device, not the
host, as long as the arm does not wait for the device itself and is queued within the longest spin,
else there is a note. XPU has no spin kernel. On the CPU it is the clock.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vocabtp.kernels as vk
from arms import first_line

SAMPLE_MS = 1.0  # a sample repeats a short launch for about as long
BUDGET_MS = 60.0  # of samples, for one arm
SLOW_MS = 250.0  # a call that long is timed once
MOST, LEAST = 21, 3  # samples
_CYCLES_PER_MS = 2_000_000  # of the spin kernel, about
_LONGEST_SPIN_MS = 50.0


class Launch:
    """An arm ready to be timed."""

    def __init__(self, call: Callable[[], object], calls: int, device: torch.device) -> None:
        self.call = call
        self.calls = calls  # calls of the op in one launch
        self.device = device
        self.how = "clock" if device.type == "cpu" else "events"
        self.note: str | None = None
        self.recorded: Callable[[], object] | None = None
        self.times: list[float] = []  # ms a call
        self.repeats = 1
        self.spin_ms = 0.0

    def record(self) -> None:
        """Make a graph of it, if that is possible."""
        if self.device.type != "cuda":
            return
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        # an earlier call's ids are waited for here: in a graph that cannot be
        vk.check_ids()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an arm may do that a graph cannot hold
            self.note = f"no graph: {first_line(error)}"
            torch.cuda.synchronize(self.device)
            with contextlib.suppress(Exception):  # nor ids of the failed attempt
                vk.check_ids()
            return
        # replaying needs the inputs, which the call holds
        self.recorded, self.call, self.how = self.call, graph.replay, "graph"

    def plan(self) -> int:
        """Choose the repeats of a sample; the number of samples that the budget allows."""
        synchronize(self.device)
        start = time.perf_counter()
        self.call()
        queued = 1e3 * (time.perf_counter() - start)
        synchronize(self.device)
        once = 1e3 * (time.perf_counter() - start)
        self.repeats = max(1, min(50, round(SAMPLE_MS / max(once, 1e-3))))
        if self.how != "clock":
            wanted = 0.1 + 1.5 * queued * self.repeats
            self.spin_ms = min(_LONGEST_SPIN_MS, wanted)
            if wanted > _LONGEST_SPIN_MS:
                late = f"queued in {queued * self.repeats:.0f} ms: the time may be the host's"
                self.note = f"{self.note}; {late}" if self.note else late
        if once > SLOW_MS:
            return 1
        taken = once * self.repeats + self.spin_ms
        return max(LEAST, min(MOST, int(BUDGET_MS / max(taken, 1e-3))))

    def sample(self) -> None:
        """Time `repeats` launches once."""
        if self.how == "clock":
            start = time.perf_counter()
            for _ in range(self.repeats):
                self.call()
            taken = 1e3 * (time.perf_counter() - start)
        else:
            taken = self._between_events()
        self.times.append(taken / (self.repeats * self.calls))

    def _between_events(self) -> float:
        module: Any = torch.get_device_module(self.device)
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        if self.device.type == "cuda":
            torch.cuda._sleep(int(self.spin_ms * _CYCLES_PER_MS))
        start.record()
        for _ in range(self.repeats):
            self.call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def turns(wanted: dict[str, int]) -> list[str]:
    """The order of all samples: arms alternate, and each round begins with another one."""
    most = max(wanted.values(), default=0)
    order: list[str] = []
    for round_ in range(most):
        due = [n for n, k in wanted.items() if round_ * k // most != (round_ + 1) * k // most]
        shift = round_ % max(len(due), 1)
        order += due[shift:] + due[:shift]
    return order


def summary(times: list[float]) -> dict[str, float]:
    """Median and spread in ms."""
    if len(times) == 1:
        times = times * 2
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    found = {"median_ms": statistics.median(times), "p20_ms": deciles[1], "p80_ms": deciles[7]}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """What one call allocates on top of its inputs at most; None where torch does not count it."""
    if device.type != "cuda":
        call()
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 2)


def copy_gb_s(device: torch.device) -> float:
    """Bandwidth of a copy of 2 GiB (16 MiB on the CPU), what is read and written counted."""
    size, samples = (2**24, LEAST) if device.type == "cpu" else (2**31, MOST)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    launch = Launch(lambda: target.copy_(source), 1, device)
    launch.repeats, launch.spin_ms = 4, 0.2
    for _ in range(3):
        launch.call()
    for _ in range(samples):
        launch.sample()
    return round(2 * size / statistics.median(launch.times) / 1e6, 1)
