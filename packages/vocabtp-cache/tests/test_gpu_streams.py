"""Streams of an accelerator, asleep or busy: who waits for whose copies, and who does not."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from accelerator_work import LAYOUTS, WIDTH, busy, device, noise, sleep
from vocabtp.cache import PinnedPool, TeacherLogitCache
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import side_stream

pytestmark = pytest.mark.gpu


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
