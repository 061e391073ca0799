"""Times the ops of vocabtp.kernels against dense PyTorch on one device.

Each arm is first judged against the fp64 reference on these very inputs; a wrong arm ends the run.
Then the arms take turns, so that a slow moment of the machine falls on all of them alike, and the
median of each is reported: a table on the terminal, one JSON object a line in --out.

    python benchmarks/run.py --ops entropy,jsd --rows 64 --vocab 32000
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import vocabtp.kernels as vk
from cases import CASES, Case, make_inputs

SCHEMA = 1
# relative to the largest magnitude of the truth: what dense fp32 arithmetic reaches with room
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
CHECKED_ROWS = 32


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; sizes left out depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--ops", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--providers", default="vocabtp,dense", help="also: vocabtp-eager")
    parser.add_argument("--rows", type=int, help="tokens (CPU 128, else 8192)")
    parser.add_argument("--vocab", type=int, help="columns (CPU 8192, else 75968)")
    parser.add_argument("--dtype", help="float32 on the CPU, else bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/bench.jsonl"))
    args = parser.parse_args(argv)
    cpu = args.device == "cpu"
    args.rows = args.rows or (128 if cpu else 8192)
    args.vocab = args.vocab or (8192 if cpu else 75968)
    args.dtype = getattr(torch, args.dtype or ("float32" if cpu else "bfloat16"))
    if unknown := set(args.ops.split(",")) - set(CASES):
        parser.error(f"--ops: no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return args


def arm(provider: str, case: Case) -> Callable[..., Tensor]:
    """The function that a provider times for this op."""
    if provider == "dense":
        return case.dense
    if provider == "vocabtp":
        return case.ours

    def eager(*inputs: Tensor) -> Tensor:
        with vk.backend("eager"):
            return case.ours(*inputs)

    return eager


def check(name: str, function: Callable[..., Tensor], case: Case, inputs: list[Tensor]) -> None:
    """End the run if the arm's values or gradients are not the truth's."""
    few = [x.detach()[:CHECKED_ROWS] for x in inputs]
    tolerance = TOLERANCE[inputs[0].dtype]
    results = []
    for op, dtype in ((function, inputs[0].dtype), (case.truth, torch.float64)):
        ours = [x.to(dtype) if x.is_floating_point() else x for x in few]
        ours[0].requires_grad_()
        value = op(*ours)
        (grad,) = torch.autograd.grad(value.sum(), ours[0])
        results.append((value.detach().double(), grad.double()))
    for what, got, truth in zip(("values", "gradients"), *results, strict=True):
        error = ((got - truth).abs().max() / truth.abs().max()).item()
        if not error <= tolerance:
            sys.exit(f"{name}: {what} are off by {error:.1e} of the largest, at most {tolerance}")


def once(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> float:
    """Milliseconds of one call, waiting for the device on both sides."""
    accelerator = inputs[0].device.type != "cpu"
    if accelerator:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    if backward:
        torch.autograd.grad(function(*inputs).sum(), inputs[0])
    else:
        with torch.no_grad():
            function(*inputs)
    if accelerator:
        torch.accelerator.synchronize()
    return 1e3 * (time.perf_counter() - start)


def peak_mib(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> float | None:
    """What one call allocates on top of its inputs at most; None where torch does not count it."""
    if inputs[0].device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    once(function, inputs, backward)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def environment(device: str) -> dict[str, object]:
    """Where and with what these numbers were taken."""
    versions: dict[str, str | None] = {"torch": torch.__version__}
    try:
        versions["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        versions["triton"] = None
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        **versions,
        "package_versions": {"vocabtp-kernels": vk.__version__},
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def measure(op: str, args: argparse.Namespace, facts: dict[str, object]) -> list[dict[str, object]]:
    """The rows of one op: every provider, forward alone and with the backward."""
    case = CASES[op]
    inputs = make_inputs(case, args.rows, args.vocab, args.dtype, torch.device(args.device))
    arms = {name: arm(name, case) for name in args.providers.split(",")}
    for name, function in arms.items():
        check(f"{op} {name}", function, case, inputs)
    found: list[dict[str, object]] = []
    for mode, passes in (("forward", case.passes_forward), ("both", case.passes_both)):
        backward = mode == "both"
        peaks = {name: peak_mib(function, inputs, backward) for name, function in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(args.repeats + 1):
            for name, function in arms.items():
                milliseconds = once(function, inputs, backward)
                if repeat:  # the first round warms up
                    times[name].append(milliseconds)
        size = passes * inputs[0].numel() * inputs[0].element_size()
        for name, taken in times.items():
            deciles = statistics.quantiles(taken, n=10, method="inclusive")
            median = statistics.median(taken)
            found.append(
                {
                    "schema": SCHEMA,
                    "op": op,
                    "provider": name,
                    "mode": mode,
                    "dtype": str(args.dtype).removeprefix("torch."),
                    "rows": args.rows,
                    "vocab": args.vocab,
                    "world": 1,
                    "median_ms": round(median, 4),
                    "p20_ms": round(deciles[1], 4),
                    "p80_ms": round(deciles[7], 4),
                    "gb_per_s": round(size / median / 1e6, 2),
                    "peak_mib": peaks[name],
                    **facts,
                }
            )
    return found


def main(argv: list[str]) -> None:
    """Measure, print the table, append the lines."""
    args = arguments(argv)
    facts = environment(args.device)
    print(f"{args.rows} x {args.vocab} {args.dtype} on {facts['device']}, torch {facts['torch']}")
    print(f"{'op':<12}{'mode':<9}{'provider':<15}{'median ms':>10}{'p20':>9}{'p80':>9}{'GB/s':>8}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as out:
        for op in args.ops.split(","):
            for row in measure(op, args, facts):
                print(
                    f"{row['op']:<12}{row['mode']:<9}{row['provider']:<15}{row['median_ms']:>10.3f}"
                    f"{row['p20_ms']:>9.3f}{row['p80_ms']:>9.3f}{row['gb_per_s']:>8.2f}"
                )
                out.write(json.dumps(row) + "\n")
    print(f"appended to {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
