"""Parts fetch and store of cache.py: copies of a payload, beside other ways to make them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from cache_parts import Call, Row, Sizes, in_turns, pinned, synchronize, timed_row
from vocabtp.cache import PinnedPool, TeacherLogitCache


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
    held: dict[str, list[float]] = {}
    host_bytes: dict[str, int] = {}

    def contiguous() -> None:
        line.copy_(source.view(-1), non_blocking=True)

    def stored(name: str, donate: bool) -> Call:
        def call() -> None:
            start = time.perf_counter()
            cache = TeacherLogitCache.store(source, pool=pool, donate=donate)
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            # until the stream that made the rows can go on
            held.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
            synchronize(device)
            host_bytes[name] = cache.allocated_nbytes
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
            # without the round that is not counted
            more = {"held_ms": statistics.median(held[arm][1:])}
            more |= {"host_bytes": host_bytes[arm], "pool_bytes": pool.nbytes}
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
