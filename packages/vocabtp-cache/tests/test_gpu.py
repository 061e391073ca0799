"""The cache between an accelerator and pinned memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vocabtp.cache import PinnedPool, TeacherHead, TeacherHiddenCache, TeacherLogitCache
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import side_stream
from vocabtp.dist import VocabShard

pytestmark = pytest.mark.gpu

WIDTH = 6016


def device() -> torch.device:
    """The accelerator; without one these tests fail, and they only run when asked for."""
    found = torch.accelerator.current_accelerator()
    assert found is not None, "the gpu tests need an accelerator"
    return torch.device(found.type, torch.accelerator.current_device_index())


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=device(), dtype=torch.float32)


def busy() -> None:
    """Queue some tens of milliseconds of work, so that a missing wait shows."""
    a = torch.ones(8192, 8192, device=device(), dtype=torch.bfloat16)
    for _ in range(20):
        a = a @ a


def sleep(stream: torch.Stream | None = None, ms: float = 30.0) -> torch.Event:
    """Hold a stream - the current one - for some milliseconds; an event behind that."""
    stream = stream or torch.accelerator.current_stream()
    with stream:
        if device().type == "cuda":
            torch.cuda._sleep(int(ms * 2_000_000))
        else:
            busy()
        event = torch.Event(device())
        event.record(stream)
    return event


LAYOUTS = {
    "contiguous": lambda x: x,
    "shifted": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))[..., :-1, :],
    "transposed": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "every other column": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(2000, WIDTH), (3, 700, WIDTH), (1, 700, WIDTH), (0, WIDTH), (5, 0), (0, 3, 8)],
)
def test_round_trip_is_exact(shape, stored, layout):
    source = LAYOUTS[layout](noise(*shape))
    kept = source.to(stored)
    cache = TeacherLogitCache.store(source, dtype=stored)
    length = len(cache)
    for start, end in ((0, length), (length // 3, length // 2), (length, length)):
        chunk = cache.fetch(start, end)
        assert chunk.device == device()
        assert torch.equal(chunk, kept[..., start:end, :])
        assert torch.equal(cache.fetch(start, end, "cpu"), kept[..., start:end, :].cpu())
        other = cache.fetch(start, end, dtype=torch.float64)
        assert torch.equal(other, kept[..., start:end, :].double())


def test_source_may_be_overwritten_at_once():
    source = noise(2000, WIDTH).bfloat16()
    kept = source.clone()
    busy()
    cache = TeacherLogitCache.store(source)
    source.zero_()
    assert torch.equal(cache.fetch(0, 2000), kept)


def test_the_host_does_not_read_before_the_copy_ended():
    source = noise(2000, WIDTH).bfloat16()
    kept = source.cpu()
    busy()
    assert torch.equal(TeacherLogitCache.store(source).fetch(0, 2000, "cpu"), kept)


def test_rows_are_pinned():
    cache = TeacherLogitCache.store(noise(300, WIDTH))
    assert all(part.is_pinned() for part in cache._host._parts)


@pytest.mark.parametrize("shape", [(4096, WIDTH), (2, 2048, WIDTH)])
def test_prefetch_beside_work_gives_the_same(shape):
    source = noise(*shape)
    kept = source.bfloat16()
    cache = TeacherLogitCache.store(source)
    length, size = len(cache), 256
    cache.prefetch(0, size)
    got = []
    for start in range(0, length, size):
        busy_part = torch.ones(2048, 2048, device=device()) @ torch.ones(
            2048, 2048, device=device()
        )
        if start + size < length:
            cache.prefetch(start + size, start + 2 * size, device().type)
        got.append(cache.fetch(start, start + size).clone())
        del busy_part
    assert torch.equal(torch.cat(got, dim=-2), kept)


def test_a_chunk_is_not_reused_while_it_is_read():
    """Chunks are dropped as soon as their reader is queued, not when it ran."""
    source = noise(4096, WIDTH)
    truth = source.bfloat16().double().sum(-1)
    cache = TeacherLogitCache.store(source)
    sums = []
    for start in range(0, 4096, 128):
        cache.prefetch(start, start + 128)
        chunk = cache.fetch(start, start + 128)
        busy_part = torch.ones(4096, 4096, device=device()) @ torch.ones(
            4096, 4096, device=device()
        )
        sums.append(chunk.double().sum(-1))
        del chunk, busy_part
    torch.testing.assert_close(torch.cat(sums), truth)


def test_free_with_copies_under_way():
    """Freed blocks are handed to the next cache: the pending copies must not mix with it."""
    for _ in range(5):
        first, second = noise(2000, WIDTH), noise(2000, WIDTH)
        busy()
        cache = TeacherLogitCache.store(first)
        cache.prefetch(0, 1000)
        chunk = cache.fetch(0, 1000)
        cache.prefetch(1000, 2000)
        cache.free()
        assert cache.closed
        following = TeacherLogitCache.store(second)
        assert torch.equal(chunk, first[:1000].bfloat16())
        assert torch.equal(following.fetch(0, 2000), second.bfloat16())


def test_fetch_waits_for_its_prefetch():
    """With nothing else queued, the reader starts long before the copy ends."""
    for _ in range(3):
        source = noise(4096, WIDTH)
        cache = TeacherLogitCache.store(source)
        torch.accelerator.synchronize()
        cache.prefetch(0, 4096)
        assert torch.equal(cache.fetch(0, 4096).clone(), source.bfloat16())


def test_a_chunk_may_be_taken_on_another_stream():
    source = noise(4096, WIDTH)
    truth = source.bfloat16().double().sum(-1)
    cache = TeacherLogitCache.store(source)
    other, home = torch.Stream(device()), torch.accelerator.current_stream()
    sums = []
    for start in range(0, 4096, 256):
        cache.prefetch(start, start + 256)
        with other:
            busy()
            sums.append(cache.fetch(start, start + 256).double().sum(-1))
        # takes the chunk's room, were it free
        torch.empty(256, WIDTH, device=device(), dtype=torch.bfloat16).fill_(7)
    home.wait_stream(other)
    torch.testing.assert_close(torch.cat(sums), truth)


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


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", [1 << 20, 32 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2000, WIDTH), (3, 700, WIDTH)])
def test_store_with_its_stream_asleep(monkeypatch, shape, layout, stage, donate):
    """The source is made late, and overwritten or dropped at once; 24 MB, through 8 or 256 MiB."""
    monkeypatch.setattr("vocabtp.cache._pinned.STAGE_BYTES", stage)
    source, made = LAYOUTS[layout](torch.zeros(shape, device=device())), noise(*shape)
    kept = made.bfloat16()
    torch.accelerator.synchronize()
    sleep()
    source.copy_(made)
    sleep(side_stream(device(), "out"))
    cache = TeacherLogitCache.store(source, donate=donate)
    if not donate:
        source.fill_(7)
    del source, made
    room = torch.full(shape, 7.0, device=device())
    assert torch.equal(cache.fetch(0, len(cache)), kept)
    del room


@pytest.mark.parametrize("donate", [False, True])
def test_store_holds_up_neither_the_host_nor_the_current_stream(donate):
    source = noise(2000, WIDTH).bfloat16()
    TeacherLogitCache.store(source, donate=donate).fetch(0, 2000)
    source + 1  # its kernel is loaded at the first call, which waits for the whole device
    torch.accelerator.synchronize()
    asleep = sleep(side_stream(device(), "out"), ms=400)
    start = time.perf_counter()
    cache = TeacherLogitCache.store(source, donate=donate)
    source + 1
    torch.accelerator.current_stream().synchronize()
    assert time.perf_counter() - start < 0.2
    assert not asleep.query()
    assert torch.equal(cache.fetch(0, 2000), source)


@pytest.mark.parametrize("to", ["cpu", "same stream", "other stream"])
@pytest.mark.parametrize("shape", [(2000, WIDTH), (3, 700, WIDTH)])
def test_a_reader_waits_for_the_copies_to_the_host(shape, to):
    source = noise(*shape).bfloat16()
    for _ in range(2):
        sleep(side_stream(device(), "out"))
        cache = TeacherLogitCache.store(source + 0)
        if to == "cpu":
            assert torch.equal(cache.fetch(0, len(cache), "cpu"), source.cpu())
            continue
        home, other = torch.accelerator.current_stream(), torch.Stream(device())
        with home if to == "same stream" else other:
            chunk = cache.fetch(0, len(cache))
        home.wait_stream(other)
        assert torch.equal(chunk, source)


def test_rows_come_back_before_the_last_have_left(monkeypatch):
    """A chunk waits for its own rows only: the bus carries both ways at once."""
    monkeypatch.setattr("vocabtp.cache._pinned.STAGE_BYTES", 500 * WIDTH * 2)
    source, plain, asleep = noise(2000, WIDTH).bfloat16(), HostRows.write, []

    def write(host: HostRows, start: int, rows: Tensor) -> None:
        if start == 1000:
            asleep.append(sleep(ms=400))
        plain(host, start, rows)

    TeacherLogitCache.store(source, donate=True).fetch(0, 500)
    torch.accelerator.synchronize()
    monkeypatch.setattr(HostRows, "write", write)
    cache = TeacherLogitCache.store(source, donate=True)
    cache.prefetch(0, 2000, chunk=500)
    chunks = [cache.fetch(0, 500), cache.fetch(500, 1000)]
    torch.accelerator.current_stream().synchronize()
    assert not asleep[0].query()
    chunks += [cache.fetch(1000, 1500), cache.fetch(1500, 2000)]
    assert torch.equal(torch.cat(chunks), source)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("asleep", ["out", "in"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_prefetch_with_a_stream_asleep(asleep, elsewhere):
    """In order, from this stream or another, with readers that drop each chunk at once."""
    source, pool = noise(4096, WIDTH).bfloat16(), PinnedPool()
    truth = source.double().sum(-1)
    home, other = torch.accelerator.current_stream(), torch.Stream(device())
    for _ in range(2):
        torch.accelerator.synchronize()
        sleep(side_stream(device(), asleep))
        cache = TeacherLogitCache.store(source + 0, pool=pool, prefetch_bytes=1500 * WIDTH * 2)
        cache.prefetch(0, 4096, chunk=500)
        sleep()
        sums = []
        for start in range(0, 4096, 500):
            with other if elsewhere else home:
                chunk = cache.fetch(start, min(4096, start + 500))
                sleep(ms=2)
                sums.append(chunk.double().sum(-1))
                del chunk
            torch.empty(500, WIDTH, device=device(), dtype=torch.bfloat16).fill_(7)
        cache.free()
        home.wait_stream(other)
        torch.testing.assert_close(torch.cat(sums), truth)


@pytest.mark.parametrize("asleep", ["out", "in", "both"])
def test_free_with_copies_queued_behind_a_sleep(asleep):
    """The next cache gets the same host memory while the copies of the last are still to come."""
    pool = PinnedPool()
    for _ in range(3):
        first, second = noise(2000, WIDTH).bfloat16(), noise(2000, WIDTH).bfloat16()
        torch.accelerator.synchronize()
        for way in ("out", "in"):
            if asleep in (way, "both"):
                sleep(side_stream(device(), way))
        cache = TeacherLogitCache.store(first, pool=pool)
        cache.prefetch(0, 2000, chunk=500)
        chunk = cache.fetch(0, 500)
        cache.free()
        following = TeacherLogitCache.store(second, pool=pool)
        assert torch.equal(chunk, first[:500])
        assert torch.equal(following.fetch(0, 2000), second)
        following.free()
    assert pool.nbytes <= 1.1 * 2000 * WIDTH * 2


def test_prefetch_runs_beside_what_is_queued_next():
    """All of a budget of chunks arrives while the current stream is held."""
    cache = TeacherLogitCache.store(noise(4096, WIDTH), prefetch_bytes=2000 * WIDTH * 2)
    cache.fetch(0, 1)
    torch.accelerator.synchronize()
    cache.prefetch(0, 4096, chunk=500)
    asleep = sleep(ms=300)
    side_stream(device(), "in").synchronize()
    assert not asleep.query()
    assert cache.prefetched_nbytes == 2000 * WIDTH * 2
    torch.accelerator.synchronize()


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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("asleep", ["out", "in"])
@pytest.mark.parametrize("shape", [(1000, 896), (3, 333, 896)])
def test_hidden_states_meet_the_head_on_the_device(shape, asleep):
    """The columns are those of the stored logits, up to the order of sums."""
    head = TeacherHead(weight=noise(WIDTH, 896).bfloat16() / 30, softcap=30.0)
    hidden, pool = noise(*shape).bfloat16(), PinnedPool()
    truth = head(hidden).double()
    torch.accelerator.synchronize()
    for _ in range(2):
        sleep(side_stream(device(), asleep))
        source = hidden.clone()
        cache = TeacherHiddenCache.store(source, head, pool=pool)
        source.zero_()
        cache.prefetch(0, len(cache), chunk=100)
        got = [
            cache.fetch(start, min(len(cache), start + 100)) for start in range(0, len(cache), 100)
        ]
        cache.free()
        found = torch.cat(got, dim=-2)
        assert found.device == device()
        assert ((found.double() - truth).abs() <= 2.0**-7 * truth.abs() + 1e-3).all()
    assert pool.nbytes <= 1.1 * hidden.numel() * 2 + 4096


@pytest.mark.parametrize("shape", [(40, 30), (1, 40, 30), (3, 40, 30)])
def test_a_cpu_cache_can_be_fetched_to_the_device(shape):
    """Pageable rows; the last chunk is a part of one."""
    source = torch.randn(shape)
    kept = source.bfloat16()
    cache = TeacherLogitCache.store(source)
    cache.prefetch(0, 20, device())
    for start, end in ((0, 20), (20, 33), (33, 40)):
        assert torch.equal(cache.fetch(start, end, device()).cpu(), kept[..., start:end, :])
        other = cache.fetch(start, end, device(), dtype=torch.float32)
        assert torch.equal(other.cpu(), kept[..., start:end, :].float())


@pytest.mark.parametrize("shape", [(2000, WIDTH), (3, 700, WIDTH)])
def test_a_saved_cache_is_read_to_the_device(tmp_path, shape):
    source = noise(*shape)
    kept = source.bfloat16()
    busy()
    TeacherLogitCache.store(source).save(tmp_path)
    half = VocabShard(WIDTH // 2, WIDTH, WIDTH)
    cache = TeacherLogitCache.open(tmp_path, half, device=device().type)
    length, size = len(cache), 100
    got = []
    cache.prefetch(0, size)
    for start in range(0, length, size):
        if start + size < length:
            cache.prefetch(start + size, start + 2 * size)
        busy()
        got.append(cache.fetch(start, start + size))
        assert got[-1].device == device()
    assert torch.equal(torch.cat(got, dim=-2), kept[..., WIDTH // 2 :])


@pytest.mark.parametrize("shape", [(2000, WIDTH), (2, 1000, WIDTH)])
def test_a_prefetch_of_saved_rows_holds_up_neither_the_host_nor_the_stream(tmp_path, shape):
    source, size = noise(*shape).bfloat16(), shape[-2] // 5
    TeacherLogitCache.store(source).save(tmp_path)
    pool = PinnedPool()
    cache = TeacherLogitCache.open(tmp_path, device=device(), pool=pool)
    # the pages of the file and of the pool are in memory, the kernel is loaded
    cache.prefetch(0, len(cache), chunk=size)
    cache.fetch(0, size)
    source + 1
    torch.accelerator.synchronize()
    asleep = sleep(side_stream(device(), "in"), ms=600)
    start = time.perf_counter()
    cache.prefetch(0, len(cache), chunk=size)
    source + 1
    torch.accelerator.current_stream().synchronize()
    assert time.perf_counter() - start < 0.4
    assert not asleep.query()
    got = [cache.fetch(start, start + size) for start in range(0, len(cache), size)]
    assert torch.equal(torch.cat(got, dim=-2), source)
    cache.free()
    torch.accelerator.synchronize()
    assert pool.used_nbytes == 0
    assert pool.nbytes <= 1.1 * source.numel() * 2


def test_threads_keep_their_current_streams():
    """Each on a stream of its own, all through the two side streams."""
    wrong = []

    def work(value: int) -> None:
        own = torch.Stream(device())
        with own:
            source = torch.full((200, WIDTH), float(value), device=device())
            for _ in range(60):
                with TeacherLogitCache.store(source) as cache:
                    cache.prefetch(0, 200, chunk=20)
                    chunks = [cache.fetch(start, start + 20) for start in range(0, 200, 20)]
                if torch.accelerator.current_stream() != own:
                    wrong.append("stream")
                    return
                if not (torch.cat(chunks) == value).all():
                    wrong.append("rows")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


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
