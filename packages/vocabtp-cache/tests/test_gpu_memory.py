"""Memory of an accelerator and page-locked memory: how much, for how long, and who gets it next."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accelerator_work import WIDTH, busy, device, noise
from vocabtp.cache import PinnedPool, TeacherLogitCache

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("drop", ["free", "garbage", "evicted"])
def test_room_of_a_dropped_prefetch_outlasts_its_copy(drop):
    size = 4096 * WIDTH * 2
    cache = TeacherLogitCache.store(noise(4096, WIDTH), prefetch_bytes=size)
    torch.accelerator.synchronize()
    cache.prefetch(0, 4096)
    if drop == "free":
        cache.free()
    elif drop == "evicted":
        cache.prefetch(0, 1)
    else:
        del cache
    room = torch.empty(4096, WIDTH, device=device(), dtype=torch.bfloat16).fill_(7)
    torch.accelerator.synchronize()
    assert (room == 7).all()


def test_a_host_that_runs_ahead_does_not_fill_the_device():
    """Case B44: of the cache, a few chunks are on the device, however slow their readers."""
    cache = TeacherLogitCache.store(noise(8192, WIDTH))
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    total, size = torch.ones((), device=device()), 256
    a = torch.ones(4096, 4096, device=device())
    out = a @ a
    before = torch.accelerator.memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    cache.prefetch(0, size)
    for start in range(0, 8192, size):
        chunk = cache.fetch(start, start + size)
        if start + size < 8192:
            cache.prefetch(start + size, start + 2 * size)
        for _ in range(4):
            torch.mm(a, a, out=out)
        total += chunk.view(-1)[:1].sum()
    grown = torch.accelerator.max_memory_reserved() - before
    assert grown <= 5 * (size * WIDTH * 2 + (2 << 20))


def test_nothing_is_on_the_device_after_an_exception():
    """Case B44: without the cycle collector, the chunks and buffers of a step that fails."""
    source, size = noise(4096, WIDTH), 500 * WIDTH * 2

    def step() -> None:
        with TeacherLogitCache.store(source, prefetch_bytes=2 * size) as cache:
            cache.prefetch(0, 4096, chunk=500)
            chunk = cache.fetch(0, 500)
            chunk += 1
            raise RuntimeError("the loss failed")

    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the loss failed"):
                step()
            torch.accelerator.synchronize()
            # the allocator looks at its events when it is asked for memory
            torch.empty(1, device=device())
            assert torch.accelerator.memory_allocated() == before
    finally:
        gc.enable()


def test_a_prefetch_without_memory_on_the_device_does_not_happen():
    source = noise(2000, WIDTH).bfloat16()
    kept = source.cpu()
    cache = TeacherLogitCache.store(source, prefetch_bytes=4 * 200 * WIDTH * 2)
    cache.fetch(0, 1)
    del source
    spare = torch.empty(64 << 20, dtype=torch.uint8, device=device())
    held: list[Tensor] = []
    size = 1 << 38
    while size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device()))
        except torch.OutOfMemoryError:
            size //= 2
    cache.prefetch(0, 2000, chunk=200)
    assert cache.prefetched_nbytes == 0
    # room for some chunks of 2.4 MB
    del spare
    for start in range(0, 2000, 200):
        assert torch.equal(cache.fetch(start, start + 200).cpu(), kept[start : start + 200])
    del held
    cache.prefetch(0, 2000, chunk=200)
    assert cache.prefetched_nbytes == cache.prefetch_bytes


def test_locked_memory_stays_near_the_payload():
    """Case B42: [4, 2112, 75968] in bf16, then 20 steps of other lengths."""
    source = torch.zeros(4, 2112, 75968, device=device(), dtype=torch.bfloat16)
    before = _host_bytes()
    with TeacherLogitCache.store(source) as cache:
        assert cache.nbytes == 1_283_555_328
        assert cache.allocated_nbytes <= 1.05 * cache.nbytes
        torch.accelerator.synchronize()
        assert _host_bytes() - before <= 1.1 * 1_283_555_328
    for step in range(20):
        with TeacherLogitCache.store(source[:, : 2112 - 97 * (step * 7 % 20)]) as cache:
            cache.fetch(0, 1)
        torch.accelerator.synchronize()
    assert _host_bytes() - before <= 1.1 * 1_283_555_328


def test_locked_memory_is_flat_over_1000_steps():
    pool, source = PinnedPool(), noise(600, WIDTH).bfloat16()
    before, counts = _host_bytes(), []
    for step in range(1000):
        rows = 1 + step * 379 % 600
        with TeacherLogitCache.store(source[:rows], pool=pool) as cache:
            cache.prefetch(0, rows)
            cache.fetch(0, rows)
        counts.append(_host_bytes() - before)
    assert pool.pinned
    assert counts[600:] == [counts[600]] * 400
    assert counts[-1] <= pool.nbytes <= 1.1 * 600 * WIDTH * 2


@pytest.mark.parametrize(
    "nbytes", [5_000, 70_000, (1 << 20) + 2, 3_500_000, 41_000_000, 300_000_000]
)
def test_small_payloads_lock_little_more(nbytes):
    """Blocks of up to 256 MiB: those of a small payload are small."""
    source, pool, before = noise(nbytes // 2, 1).bfloat16(), PinnedPool(), _host_bytes()
    with TeacherLogitCache.store(source, pool=pool) as cache:
        assert cache.nbytes == nbytes
        torch.accelerator.synchronize()
        assert pool.pinned
        assert pool.nbytes <= max(1.1 * nbytes, nbytes + 4096)
        assert _host_bytes() - before <= pool.nbytes


def test_page_locking_that_fails_leaves_no_error_in_the_runtime(monkeypatch):
    """What cannot be locked is asked for in earnest: an exbibyte in place of each block."""
    plain, asked = torch.empty, []

    def empty(*size, **options):
        if options.get("pin_memory"):
            asked.append(size)
            size = (1 << 60,)
        return plain(*size, **options)

    source, pool = noise(300, WIDTH), PinnedPool()
    torch.accelerator.synchronize()
    monkeypatch.setattr("vocabtp.cache.pool.torch.empty", empty)
    with pytest.warns(RuntimeWarning, match="could not be page-locked") as seen:
        cache = TeacherLogitCache.store(source, pool=pool)
    assert (len(asked), len(seen), pool.pinned) == (1, 1, False)
    assert _last_error() == 0
    # what comes next would report an error that was left behind
    assert float((source * 0).sum()) == 0
    torch.accelerator.synchronize()
    assert _last_error() == 0
    assert torch.equal(cache.fetch(0, 300), source.bfloat16())
    assert torch.equal(cache.fetch(0, 300, "cpu"), source.bfloat16().cpu())
    assert not any(part.is_pinned() for part in cache._host._parts)


def _last_error() -> int:
    """What the CUDA runtime that torch runs on remembers; 0 on other devices."""
    if torch.version.cuda is None:
        return 0
    maps = Path("/proc/self/maps").read_text().split()
    runtime = next(word for word in maps if "libcudart" in word)
    return int(ctypes.CDLL(runtime).cudaPeekAtLastError())


@pytest.mark.usefixtures("poisoned")
def test_poison_in_what_was_handed_back_reaches_nobody():
    pool = PinnedPool()
    for _ in range(3):
        source = noise(2000, WIDTH).bfloat16()
        busy()
        cache = TeacherLogitCache.store(source, pool=pool)
        cache.prefetch(0, 900)
        other = torch.Stream(device())
        with other:
            busy()
            late = cache.fetch(1000, 2000)
        chunk = cache.fetch(0, 900)
        cache.free()
        assert torch.equal(chunk, source[:900])
        torch.accelerator.current_stream().wait_stream(other)
        assert torch.equal(late, source[1000:])


def test_reused_memory_waits_for_the_copies_of_its_last_cache():
    """Both ways, and from another stream or the host, which nothing else holds back."""
    pool, other = PinnedPool(), torch.Stream(device())
    first, second = noise(2000, WIDTH).bfloat16(), noise(2000, WIDTH).bfloat16()
    torch.accelerator.synchronize()
    busy()
    TeacherLogitCache.store(first, pool=pool).free()
    with other:
        cache = TeacherLogitCache.store(second, pool=pool)
        torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(cache.fetch(0, 2000), second)
    torch.accelerator.synchronize()
    busy()
    chunk = cache.fetch(0, 2000)
    cache.free()
    TeacherLogitCache.store(torch.zeros(2000, WIDTH), pool=pool)
    assert torch.equal(chunk, second)
    assert pool.nbytes <= 1.1 * 2000 * WIDTH * 2


def _host_bytes() -> int:
    """Pinned bytes that torch holds, in use or kept for later; 0 where a backend has no count."""
    stats = getattr(torch.get_device_module(), "host_memory_stats", dict)()
    return stats.get("allocated_bytes.current", 0)
