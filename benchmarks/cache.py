"""The teacher cache on this device: copies both ways, beside a training step, and memory locked.

    python benchmarks/cache.py --out benchmarks/results/cache/NAME.json
    python benchmarks/cache.py --docs docs benchmarks/results/cache/NAME.json

The first measures, about a minute on one H200; `--parts fetch,step` only some of it. The second
writes tables and plots of such a file into DOCS/cache.md and DOCS/assets/cache. Times are taken by
the clock from a call to the end of all that it queued on the device, arms in turns, medians.

What a part has:

    fetch    chunks of a cache to the device, beside other ways to copy the same bytes
    store    rows to the host, likewise; bytes of host memory
    step     forward, loss in chunks and backward of a student, the teacher's rows on the device or
             in a cache; how much of the copies the step hides
    hidden   hidden states against logits: bytes, times, difference of what is fetched
    locked   page-locked memory over 1000 steps of random lengths
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cache_copies import fetch, store
from cache_hidden import hidden
from cache_locked import empty_host_cache, locked
from cache_parts import QUICK, Row, Sizes
from cache_step import step
from results import facts

SCHEMA = 1
PARTS: dict[str, Callable[[Sizes, torch.device], Iterator[Row]]] = {
    "fetch": fetch,
    "store": store,
    "step": step,
    "hidden": hidden,
    "locked": locked,
}


def line(row: Row) -> str:
    """A result for the terminal."""
    shown = {k: v for k, v in row.items() if k not in ("part", "arm", "held", "largest")}
    text = " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items()
    )
    return f"{row['part']:7} {row['arm']:28} {text}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts and write the file after each."""
    device = torch.device(args.device)
    sizes = QUICK if args.quick else Sizes()
    run = {**facts(device, args.commit), "torch": torch.__version__, "seconds": {}}
    file: dict[str, Any] = {"schema": SCHEMA, "run": run, "results": []}
    for name in args.parts:
        start = time.perf_counter()
        for row in PARTS[name](sizes, device):
            print(line(row), flush=True)
            file["results"].append(row)
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            empty_host_cache()
        run["seconds"][name] = round(time.perf_counter() - start, 1)
        lines = ",\n".join(json.dumps(row) for row in file["results"])
        text = f'{{"schema": {SCHEMA},\n"run": {json.dumps(run)},\n"results": [\n{lines}\n]}}\n'
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    print(f"{sum(run['seconds'].values()):.0f} s, {run['seconds']}")
    return file


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("file", nargs="?", type=Path, help="measured before, to be shown")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small shapes, once")
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--out", type=Path, default=Path("runs/cache.json"))
    parser.add_argument("--docs", type=Path, help="the folder with cache.md")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    path: Path | None = args.file
    file = measure(args) if path is None else json.loads(path.read_text(encoding="utf-8"))
    if args.docs is not None:
        # matplotlib, which measuring does not need
        import cache_docs

        cache_docs.write(file, args.docs)


if __name__ == "__main__":
    main(sys.argv[1:])
