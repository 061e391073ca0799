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
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from results import facts
from vocabtp.cache import (
    PinnedPool,
    TeacherCache,
    TeacherHead,
    TeacherHiddenCache,
    TeacherLogitCache,
)
from vocabtp.dist import vocab_parallel_kl_div

SCHEMA = 1
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


def clock(call: Call, device: torch.device) -> float:
    """Milliseconds of one call and all that it queued."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def in_turns(arms: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """The median of each arm, after one call that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, call in arms.items():
            taken = clock(call, device)
            if round_:
                times[name].append(taken)
    return {name: statistics.median(found) for name, found in times.items()}


def pinned(*shape: int) -> Tensor:
    """Page-locked bf16, where there is an accelerator to lock pages for."""
    lock = torch.accelerator.is_available()
    return torch.empty(shape, dtype=torch.bfloat16, pin_memory=lock)


def timed_row(part: str, arm: str, ms: float, nbytes: int, **more: object) -> Row:
    """One result of copying `nbytes`."""
    return {"part": part, "arm": arm, "ms": ms, "bytes": nbytes, "gb_s": nbytes / ms / 1e6, **more}


# --- copies --------------------------------------------------------------------------------------


def fetch(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """All whole chunks of a payload, one after the other, without prefetch."""
    for width in sizes.widths:
        for layout in ("packed", "sequences"):
            yield from _fetch(sizes, device, width, layout)


def _fetch(sizes: Sizes, device: torch.device, width: int, layout: str) -> Iterator[Row]:
    batch, positions, chunk = sizes.batch, sizes.positions, sizes.chunk
    shape = (batch, positions, width) if layout == "sequences" else (batch * positions, width)
    chunk = chunk if layout == "sequences" else chunk * batch
    starts = range(0, shape[-2] - chunk + 1, chunk)
    source = torch.ones(shape, device=device, dtype=torch.bfloat16)
    cache = TeacherLogitCache.store(source, pool=PinnedPool())
    nbytes = len(starts) * batch * sizes.chunk * width * 2
    line = pinned(batch * sizes.chunk * width)
    target = torch.empty(line.shape, device=device, dtype=torch.bfloat16)
    field = pinned(*shape).fill_(1)
    stage = pinned(*shape[:-2], chunk, width)

    def contiguous() -> None:
        for _ in starts:
            target.copy_(line, non_blocking=True)

    def fetched() -> None:
        for start in starts:
            cache.fetch(start, start + chunk)

    def strided() -> None:
        for start in starts:
            field[..., start : start + chunk, :].to(device, non_blocking=True)

    def staged() -> None:
        for start in starts:
            stage.copy_(field[..., start : start + chunk, :])
            target.view(stage.shape).copy_(stage, non_blocking=True)
            # the buffer is written again
            synchronize(device)

    arms: dict[str, Call] = {
        "contiguous pinned": contiguous,
        "cache.fetch": fetched,
        ".to(device)": strided,
        "staging buffer": staged,
    }
    found = in_turns(arms, device, sizes.rounds)
    cache.free()
    for arm, ms in found.items():
        yield timed_row(
            "fetch",
            arm,
            ms,
            nbytes,
            layout=layout,
            chunk=[*shape[:-2], chunk, width],
            chunks=len(starts),
            of_contiguous=found["contiguous pinned"] / ms,
        )


def store(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """A whole payload to memory that the pool holds already."""
    for width in sizes.widths:
        for layout in ("packed", "sequences"):
            shape: tuple[int, ...] = (sizes.batch, sizes.positions, width)
            shape = shape if layout == "sequences" else (shape[0] * shape[1], width)
            yield from _store(sizes, device, shape, layout)


def _store(
    sizes: Sizes, device: torch.device, shape: tuple[int, ...], layout: str
) -> Iterator[Row]:
    source = torch.ones(shape, device=device, dtype=torch.bfloat16)
    line, pool = pinned(source.numel()), PinnedPool()
    held: dict[str, float] = {}

    def contiguous() -> None:
        line.copy_(source.view(-1), non_blocking=True)

    def stored(name: str, donate: bool) -> Call:
        def call() -> None:
            start = time.perf_counter()
            cache = TeacherLogitCache.store(source, pool=pool, donate=donate)
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            # until the stream that made the rows can go on
            held[name] = 1e3 * (time.perf_counter() - start)
            synchronize(device)
            held["bytes"] = cache.allocated_nbytes
            cache.free()

        return call

    arms: dict[str, Call] = {"contiguous pinned": contiguous}
    for name, donate in (("store", False), ("store, donated", True)):
        arms[name] = stored(name, donate)
    found = in_turns(arms, device, sizes.rounds)
    nbytes = source.numel() * 2
    for arm, ms in found.items():
        more: dict[str, object] = {}
        if arm != "contiguous pinned":
            more = {"held_ms": held[arm], "host_bytes": held["bytes"], "pool_bytes": pool.nbytes}
        yield timed_row(
            "store",
            arm,
            ms,
            nbytes,
            layout=layout,
            shape=list(shape),
            of_contiguous=found["contiguous pinned"] / ms,
            **more,
        )


# --- beside a training step ----------------------------------------------------------------------


class Layer(nn.Module):
    """A decoder layer: attention and a gated product, as large as a real one's."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, H]`."""
        parts = self.mix(_normed(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, value = self.up(_normed(x)).chunk(2, -1)
        out: Tensor = x + self.down(functional.silu(gate) * value)
        return out


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def step(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """A step on packed rows of `batch` sequences, every position a response token."""
    width, rows = sizes.widths[0], sizes.batch * sizes.step_positions
    chunk = sizes.chunk * sizes.batch // 2
    layers = [Layer(sizes.student, sizes.inner, sizes.heads) for _ in range(sizes.layers)]
    student = nn.Sequential(*layers, nn.Linear(sizes.student, width, bias=False))
    student = student.to(device, torch.bfloat16)
    inputs = torch.randn(sizes.batch, sizes.step_positions, sizes.student, device=device)
    inputs = inputs.bfloat16()
    teacher = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    pool, nbytes = PinnedPool(), teacher.numel() * 2

    def train(read: Callable[[int, int], Tensor]) -> None:
        logits = student(inputs).flatten(0, 1)
        grad = torch.empty_like(logits)
        for start in range(0, rows, chunk):
            part = logits.detach()[start : start + chunk].requires_grad_()
            value = vocab_parallel_kl_div(part, read(start, min(rows, start + chunk)), reverse=True)
            (grad[start : start + chunk],) = torch.autograd.grad(value.sum(), part)
        logits.backward(grad)
        student.zero_grad()

    def cached(cache: TeacherCache, budget: int) -> None:
        if budget:
            cache.prefetch(0, rows, chunk=chunk)
        train(cache.fetch)

    def kept(budget: int) -> Call:
        cache = TeacherLogitCache.store(teacher, pool=pool, prefetch_bytes=budget)
        return lambda: cached(cache, budget)

    def whole() -> None:
        with TeacherLogitCache.store(teacher, pool=pool, donate=True) as cache:
            cached(cache, nbytes)

    alone = TeacherLogitCache.store(teacher, pool=pool)

    def back() -> None:
        for start in range(0, rows, chunk):
            alone.fetch(start, min(rows, start + chunk))

    def both() -> None:
        with TeacherLogitCache.store(teacher, pool=pool, donate=True) as cache:
            for start in range(0, rows, chunk):
                cache.fetch(start, min(rows, start + chunk))

    def forward() -> None:
        with torch.no_grad():
            student(inputs)

    budgets = [nbytes, nbytes // 2, 0]
    arms: dict[str, Call] = {
        "forward alone": forward,
        "copies to the device alone": back,
        "copies both ways alone": both,
        "on the device": lambda: train(lambda a, b: teacher[a:b]),
        **{f"cache, budget {n}": kept(n) for n in budgets},
        "store and cache": whole,
    }
    found = in_turns(arms, device, sizes.rounds + 2)
    shape = {"rows": rows, "cols": width, "chunk": chunk}
    size = [sizes.layers, sizes.student, sizes.inner]
    for arm, ms in found.items():
        more: dict[str, object] = {}
        if arm.startswith("cache"):
            copy, budget = found["copies to the device alone"], int(arm.rpartition(" ")[2])
            more = {"copy_ms": copy, "hidden": 1 - (ms - found["on the device"]) / copy}
            more["budget"] = budget
        elif arm.startswith("store"):
            copy = found["copies both ways alone"]
            more = {"copy_ms": copy, "hidden": 1 - (ms - found["on the device"]) / copy}
        yield {
            "part": "step",
            "arm": arm,
            "ms": ms,
            "bytes": nbytes,
            **more,
            **shape,
            "student": size,
        }


# --- hidden states -------------------------------------------------------------------------------


def hidden(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """The same rows kept as hidden states and as logits, for teachers of several widths."""
    for width in sizes.hidden:
        yield from _hidden(sizes, device, width)


def _hidden(sizes: Sizes, device: torch.device, width: int) -> Iterator[Row]:
    rows, columns, chunk = sizes.hidden_rows, sizes.widths[0], sizes.chunk * 2
    weight = torch.randn(columns, width, device=device, dtype=torch.bfloat16) / width**0.5
    head, pool = TeacherHead(weight=weight), PinnedPool()
    states = torch.randn(rows, width, device=device, dtype=torch.bfloat16) * 3
    logits = head(states)
    stores: dict[str, Callable[[], TeacherCache]] = {
        "logits": lambda: TeacherLogitCache.store(logits, pool=pool, donate=True),
        "hidden": lambda: TeacherHiddenCache.store(states, head, pool=pool, donate=True),
    }
    caches = {name: make() for name, make in stores.items()}

    def read(name: str) -> Call:
        def call() -> None:
            for start in range(0, rows, chunk):
                caches[name].fetch(start, min(rows, start + chunk))

        return call

    def keep(name: str) -> Call:
        return lambda: stores[name]().free()

    fetched = in_turns({name: read(name) for name in caches}, device, sizes.rounds)
    stored = in_turns({name: keep(name) for name in caches}, device, sizes.rounds)
    error = _difference(caches, rows, chunk)
    for name, cache in caches.items():
        yield {
            "part": "hidden",
            "arm": name,
            "width": width,
            "rows": rows,
            "cols": columns,
            "chunk": chunk,
            "row_bytes": cache.row_nbytes,
            "store_ms": stored[name],
            "fetch_ms": fetched[name],
            **(error if name == "hidden" else {}),
        }


def _difference(caches: dict[str, TeacherCache], rows: int, chunk: int) -> Row:
    """How far what is fetched is from the stored logits: in the numbers and as a divergence."""
    most = differ = divergence = 0.0
    for start in range(0, rows, chunk):
        end = min(rows, start + chunk)
        a, b = (caches[name].fetch(start, end) for name in ("hidden", "logits"))
        gap, size = (a.float() - b.float()).abs(), b.float().abs()
        # one unit in bf16's last place is 1/256 to 1/128 of a number
        most = max(most, float((gap / size.clamp(min=2.0**-6)).max()))
        differ += float((gap > 0).sum(dtype=torch.float64)) / (rows * gap.shape[1])
        divergence += float(vocab_parallel_kl_div(a, b, reverse=True).sum(dtype=torch.float64))
    return {"relative": most, "differ": differ, "kl": divergence / rows}


# --- locked memory -------------------------------------------------------------------------------


def locked(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Locked bytes while caches of random lengths come and go: the pool, and one tensor a step."""
    width, most = sizes.widths[0], sizes.locked_rows
    source = torch.ones(most, width, device=device, dtype=torch.bfloat16)
    every = max(1, sizes.steps // 200)
    lengths = random.Random(0)
    rows = [lengths.randint(1, most) for _ in range(sizes.steps)]
    payload = [2 * n * width for n in rows]
    empty_host_cache()
    before, held = host_bytes(), []
    if before is not None:
        for n in rows:
            pinned(n, width).copy_(source[:n], non_blocking=True)
            # what is under way could not be used again
            synchronize(device)
            held.append((host_bytes() or 0) - before)
        yield _series("a pinned tensor each step", held, payload, every)
    pool, held = PinnedPool(), []
    for n in rows:
        with TeacherLogitCache.store(source[:n], pool=pool) as cache:
            cache.fetch(0, n)
        held.append(pool.nbytes)
    synchronize(device)
    yield _series("PinnedPool", held, payload, every)


def _series(arm: str, held: list[int], payload: list[int], every: int) -> Row:
    largest = [max(payload[: i + 1]) for i in range(len(payload))]
    return {
        "part": "locked",
        "arm": arm,
        "steps": len(held),
        "every": every,
        "held": held[::every],
        "largest": largest[::every],
        "ratio": held[-1] / largest[-1],
        "last_growth": max((i for i in range(1, len(held)) if held[i] != held[i - 1]), default=0),
    }


def host_bytes() -> int | None:
    """Pinned bytes that torch holds; None where a device does not count them."""
    if not torch.accelerator.is_available():
        return None
    stats: dict[str, int] = getattr(torch.get_device_module(), "host_memory_stats", dict)()
    return stats.get("allocated_bytes.current")


def empty_host_cache() -> None:
    """Give pinned memory that torch keeps for later back to the system."""
    if torch.accelerator.is_available():
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        # before torch 2.12 it had no public name
        empty = empty or getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


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
