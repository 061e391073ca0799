"""Part locked of cache.py: page-locked memory over steps of random lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from cache_parts import Row, Sizes, pinned, synchronize
from vocabtp.cache import PinnedPool, TeacherLogitCache


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
