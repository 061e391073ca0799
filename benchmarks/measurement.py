"""One op in one mode on one set of inputs: all arms judged, then timed in turns."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from arms import Arm, first_line
from cases import Case, Inputs, Op
from results import Result
from timing import LEAST, Launch, peak_mib, summary, synchronize, turns
from verdict import Truth, complaint, errors, find_truth

_COLUMNS = (
    *("op", "mode", "arm", "rows", "cols", "dtype", "layout"),
    *("median ms", "p20", "p80", "x floor", "peak MiB", "how"),
)
HEADER = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"

Outcome = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # values, gradients


def call(op: Op, inputs: list[Tensor], leaves: list[Tensor]) -> Outcome:
    """One call, with the gradients of the leaves if there are any."""
    if not leaves:
        with torch.no_grad():
            values = op(*inputs)
        return (values if isinstance(values, tuple) else (values,)), ()
    values = op(*inputs)
    values = values if isinstance(values, tuple) else (values,)
    return values, torch.autograd.grad(values, leaves, [_ones(value) for value in values])


_upstream: dict[tuple[object, ...], Tensor] = {}


def _ones(like: Tensor) -> Tensor:
    """Upstream gradients: made once, so that no call pays for them."""
    key = (tuple(like.shape), like.dtype, like.device)
    if key not in _upstream:
        _upstream[key] = torch.ones_like(like)
    return _upstream[key]


def arguments(case: Case, mode: str, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """An op's arguments as leaves of their own, and those that want a gradient."""
    given = [x.detach() for x in inputs.of(case)]
    wanted = {"forward": 0, "train": 1, "train_both": 2}[mode]
    return given, [x.requires_grad_() for x in given[:wanted]]


def measure(
    base: Result,
    case: Case,
    arms: dict[str, Arm],
    sets: Sequence[Inputs],
    copy_gb_s: float,
    quick: bool,
) -> Iterator[Result]:
    """A result for each arm, whatever becomes of it."""
    if not arms:
        return
    mode = base["mode"]
    given = [arguments(case, mode, inputs) for inputs in sets]
    first = given[0][0][0]
    truth = find_truth(case, given[0][0], any(arm.mean for arm in arms.values()))
    found: dict[str, Result] = {}
    ready: dict[str, Launch] = {}
    samples: dict[str, int] = {}
    for name, arm in arms.items():
        found[name] = {**base, "arm": name, "status": "ok"}
        with _Failures(found[name], first.device):
            op = arm.ops[base["op"]]
            found[name] |= _judge(op, arm, given[0], truth)
            if found[name]["status"] != "ok":
                continue
            once = partial(call, op, *given[0])
            found[name]["peak_mib"] = peak_mib(once, first.device)
            launch = Launch(partial(_each, op, given), len(given), first.device)
            if arm.captured:
                launch.record()
            samples[name] = min(launch.plan(), LEAST if quick else 10**9)
            ready[name] = launch
    for name in turns(samples):
        if found[name]["status"] == "ok":
            with _Failures(found[name], first.device):
                ready[name].sample()
    size = case.passes(mode) * first.numel() * first.element_size()
    for name, result in found.items():
        if result["status"] == "ok":
            result |= _numbers(ready[name], size, copy_gb_s)
        yield result


def _each(op: Op, given: list[tuple[list[Tensor], list[Tensor]]]) -> list[Outcome]:
    # all results live to the end, so that gradients do not share one cached place either
    return [call(op, inputs, leaves) for inputs, leaves in given]


def _judge(op: Op, arm: Arm, given: tuple[list[Tensor], list[Tensor]], truth: Truth) -> Result:
    values, gradients = call(op, *given)
    value, gradient = errors(truth, values, gradients, arm.mean)
    wrong = complaint(value, gradient, given[0][0].dtype)
    found: Result = {"value_error": float(f"{value:.2g}")}
    if gradient is not None:
        found["gradient_error"] = float(f"{gradient:.2g}")
    return found | ({"status": "wrong", "note": wrong} if wrong else {})


def _numbers(launch: Launch, size: int, copy_gb_s: float) -> Result:
    times = summary(launch.times)
    gb_s = size / times["median_ms"] / 1e6
    return {
        **times,
        "samples": len(launch.times),
        "calls": launch.repeats * launch.calls,
        "sets": launch.calls,
        "how": launch.how,
        "note": launch.note,
        "bytes": size,
        "gb_s": float(f"{gb_s:.5g}"),
        "floor": float(f"{copy_gb_s / gb_s:.5g}"),  # time over that of a copy of these bytes
    }


class _Failures:
    """Turns what an arm raises into its result; the other arms go on."""

    def __init__(self, result: Result, device: torch.device) -> None:
        self.result, self.device = result, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        memory = isinstance(error, torch.OutOfMemoryError)
        self.result |= {
            "status": "oom" if memory else "failed",
            "note": f"{type(error).__name__}: {first_line(error)}",
        }
        error.__traceback__ = None  # it holds the tensors of the call
        gc.collect()
        if self.device.type == "cuda":
            synchronize(self.device)  # raises, and ends the run, where the device itself is broken
            torch.cuda.empty_cache()
        return True


def line(result: Result) -> str:
    """A row of the table."""
    cells = [result[k] for k in ("op", "mode", "arm", "rows", "cols", "dtype", "layout")]
    if result["status"] == "ok":
        times = [f"{result[k]:.4g}" for k in ("median_ms", "p20_ms", "p80_ms")]
        peak = result.get("peak_mib")
        cells += [*times, f"{result['floor']:.3f}", "" if peak is None else peak, result["how"]]
    else:
        cells += [result["status"], "", "", "", "", result["note"]]
    return f"| {' | '.join(map(str, cells))} |"
