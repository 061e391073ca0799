"""Measures every op of vocabtp.kernels beside other implementations, in one run on one device.

    python benchmarks/ops.py                                  all of it
    python benchmarks/ops.py --quick                          a look: one shape, few samples
    python benchmarks/ops.py --only jsd,triton,compile --rows 64,256 --cols 75968
    python benchmarks/ops.py --tp 2                           sharded JSD on two ranks

An arm is first judged against the fp64 reference; one that is wrong is shown as wrong, one that
runs out of memory as OOM, and neither is timed. Results go into --out as they come; a file that
exists is added to. README.md says what is counted and how times are taken.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

import arms
import measurement
import shards
import timing
from cases import CASES, MODES, make_inputs
from results import Result, Results, facts

ROWS = (64, 256, 1024, 8192)
OWN = ("triton", "eager")
COLS = (32000, 37984, 75967, 75968, 151936)
# where every arm is measured, in the order of interest
SHARED = ((8192, 75968), (64, 75968), (1024, 151936))
# where torch.compile is measured too
FEW = ((256, 75968), (1024, 75968))
DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("contiguous", "sliced", "window")
_L2_BYTES = 160_000_000  # of input sets, more than a chip's L2 holds


class Point(NamedTuple):
    """Inputs that arms are compared on."""

    rows: int
    cols: int
    dtype: str
    layout: str


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; what is left out depends on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    names = {"ops": CASES, "modes": MODES, "arms": arms.NAMES, "dtypes": DTYPES, "layouts": LAYOUTS}
    parser.add_argument(
        "--only",
        default="",
        help="comma-separated names, which restrict whatever they are: "
        + "; ".join(f"{what} {', '.join(known)}" for what, known in names.items()),
    )
    parser.add_argument("--rows", help="comma-separated; shapes other than the usual ones")
    parser.add_argument("--cols", help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="8192 x 75968 alone, few samples")
    parser.add_argument("--missing", action="store_true", help="skip what --out holds already")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no point after this time")
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--tp", type=int, help="sharded JSD on so many ranks instead")
    parser.add_argument("--out", type=Path, default=Path("runs/ops.json"))
    args = parser.parse_args(argv)
    asked = set(filter(None, args.only.split(",")))
    if unknown := asked.difference(*names.values()):
        parser.error(f"--only: no {', '.join(sorted(unknown))}")
    for what, known in names.items():
        setattr(args, what, tuple(n for n in known if n in asked) or tuple(known))
    if not asked & set(DTYPES):
        args.dtypes = ("bfloat16", "float32")
    if args.device == "cpu" and "compile" not in asked:
        args.arms = tuple(name for name in args.arms if name != "compile")
    for sizes in ("rows", "cols"):
        text = getattr(args, sizes)
        setattr(args, sizes, tuple(int(x) for x in text.split(",")) if text else ())
    return args


def points(args: argparse.Namespace) -> Iterator[Point]:
    """What to measure, the most interesting first."""
    shapes = [*SHARED, *FEW, *product(ROWS[::-1], COLS)]
    if args.device == "cpu":
        shapes = [(64, 4096)]
    if args.quick and not (args.rows or args.cols):
        shapes = shapes[:1]
    if args.rows or args.cols:
        rows = args.rows or sorted({n for n, _ in shapes})
        cols = args.cols or sorted({n for _, n in shapes})
        usual = [shape for shape in shapes if shape[0] in rows and shape[1] in cols]
        shapes = [*usual, *product(rows, cols)]
    for layout in args.layouts:
        # one shape tells what rows that begin anywhere cost, and asking for others gives them
        some = shapes if layout != "window" or args.rows or args.cols else shapes[:1]
        for shape in dict.fromkeys(some):
            for dtype in args.dtypes:
                yield Point(*shape, dtype, layout)


def arms_at(point: Point, mode: str, found: dict[str, arms.Arm]) -> list[str]:
    """Which arms are measured there; shapes that are not in the plan have all of them."""
    shape, contiguous = (point.rows, point.cols), point.layout == "contiguous"
    if not (point.rows in ROWS and point.cols in COLS):
        return [*found] if contiguous else [n for n in found if n in OWN]
    triton = [n for n in found if n == "triton"]
    if shape == SHARED[0] and contiguous:
        return [*found]
    if mode != "train" and shape != SHARED[0] and not (shape in SHARED and contiguous):
        return []
    names = triton
    if shape in SHARED and contiguous:
        # a compilation each: the first shape tells what the teacher's gradient costs
        names = [n for n in found if n != "eager" and (n != "compile" or mode != "train_both")]
    elif shape in FEW and contiguous:
        names += [n for n in found if n == "compile"]
    # the eager path is a hundred times slower: one mode tells
    if mode == "train" and point.layout != "window":
        names += [n for n in found if n == "eager"]
    return names


def work_at(
    point: Point, found: dict[str, arms.Arm], args: argparse.Namespace, results: Results
) -> Iterator[tuple[Result, dict[str, arms.Arm]]]:
    """What is to be done at one point: an op in a mode, and the arms of it."""
    for op in args.ops:
        for mode in (m for m in CASES[op].modes if m in args.modes):
            base = {"kind": "op", "op": op, "mode": mode, **point._asdict(), "world": 1}
            names = [
                name
                for name in arms_at(point, mode, found)
                if op in found[name].ops and mode in found[name].modes
                if not (args.missing and results.has({**base, "arm": name}))
            ]
            if names:
                yield base, {name: found[name] for name in names}


def measure_point(
    point: Point,
    found: dict[str, arms.Arm],
    args: argparse.Namespace,
    results: Results,
    copy_gb_s: float,
) -> Iterator[Result]:
    """Every op at one point, mode by mode."""
    work = list(work_at(point, found, args, results))
    if not work:
        return
    device = torch.device(args.device)
    dtype = getattr(torch, point.dtype)
    one = point.rows * point.cols * dtype.itemsize
    sets = 1 if device.type == "cpu" else max(1, -(-_L2_BYTES // one))
    inputs = [
        make_inputs(point.rows, point.cols, dtype, point.layout, device, seed)
        for seed in range(sets)
    ]
    for base, here in work:
        case = CASES[base["op"]]
        chosen = inputs[: -(-sets // case.sides)]
        if "compile" in here:
            torch._dynamo.reset()  # it gives up on a function that it compiled many times
        yield from measurement.measure(base, case, here, chosen, copy_gb_s, args.quick)


def main(argv: list[str]) -> None:
    """Measure, print the table, keep the results."""
    args = arguments(argv)
    if args.tp:
        shards.main(args)
        return
    began = time.monotonic()
    device = torch.device(args.device)
    found, absent = arms.find(args.arms, device)
    copy_gb_s = timing.copy_gb_s(device)
    run = {
        **facts(device, args.commit),
        "versions": arms.versions([*found]),
        "copy_gb_s": copy_gb_s,
        "absent": absent,
    }
    results = Results(args.out, run)
    print(f"{run['device']}, {run['versions']}, copy {copy_gb_s} GB/s")
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    print(measurement.HEADER)
    left = list(points(args))
    while left and time.monotonic() - began < args.limit_s:
        try:
            for result in measure_point(left.pop(0), found, args, results, copy_gb_s):
                print(measurement.line(result), flush=True)
                results.add(result)
        finally:
            results.run["seconds"] = round(time.monotonic() - began, 1)
            results.save()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if left:
        print(f"--limit-s: {len(left)} points are left; --missing measures them")
    print(f"{time.monotonic() - began:.0f} s; results in {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
