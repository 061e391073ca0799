"""How many chunks are alive: the budget's and the one that was handed out, and none at the end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import TeacherCache, TeacherLogitCache

ROW = 64  # bytes of a row here: 32 columns in bf16


def cache_of(rows: int, **options: int) -> TeacherLogitCache:
    return TeacherLogitCache.store(torch.arange(rows * 32.0).view(rows, 32), **options)


@pytest.fixture
def chunks(monkeypatch):
    """Every chunk that caches make: how many are alive, and how many were at most."""
    return watch(monkeypatch)


def watch(monkeypatch):
    class Chunks:
        alive = most = made = 0

        def gone(self):
            self.alive -= 1

    found, plain = Chunks(), TeacherCache._room

    def room(cache, key):
        out = plain(cache, key)
        found.alive += 1
        found.made += 1
        found.most = max(found.most, found.alive)
        weakref.finalize(out, found.gone)
        return out

    monkeypatch.setattr(TeacherCache, "_room", room)
    return found


@pytest.fixture
def no_collector():
    """What is alive is what is referred to: nothing may hang on a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    rows=st.integers(0, 40),
    chunk=st.integers(1, 12),
    budget=st.integers(0, 30),
    batch=st.sampled_from([None, 1, 3]),
    again=st.booleans(),
)
def test_as_many_chunks_are_ahead_as_the_budget_allows(rows, chunk, budget, batch, again):
    shape = (rows, 32) if batch is None else (batch, rows, 32)
    source = torch.randn(shape).bfloat16()
    times = batch or 1
    cache = TeacherLogitCache.store(source, prefetch_bytes=budget * ROW * times)
    spans = [(a, min(a + chunk, rows)) for a in range(0, rows, chunk)]
    with pytest.MonkeyPatch.context() as patch:
        alive = watch(patch)
        cache.prefetch(0, rows, chunk=chunk)
        for i, (a, b) in enumerate(spans):
            ahead, room = [], budget
            for c, d in spans[i:]:
                if d - c > room:
                    break
                ahead.append((c, d))
                room -= d - c
            assert cache.prefetched_nbytes == sum(d - c for c, d in ahead) * ROW * times
            assert cache.prefetched_nbytes <= cache.prefetch_bytes
            if again:
                cache.prefetch(a, rows, chunk=chunk)
            assert alive.alive == len(ahead)
            got = cache.fetch(a, b)
            assert torch.equal(got, source[..., a:b, :])
            assert alive.alive == 1 + len(cache._ahead)
            assert cache.prefetched_nbytes <= cache.prefetch_bytes
            del got
        # each was copied once
        assert alive.made == len(spans)
        assert alive.alive == cache.prefetched_nbytes == 0


def test_a_prefetch_above_the_budget_drops_older_ones(chunks):
    cache = cache_of(8, prefetch_bytes=2 * ROW)
    for start in range(7):
        cache.prefetch(start, start + 1)
        cache.prefetch(start, start + 1)
        assert chunks.alive == min(start + 1, 2)
    cache.prefetch(0, 3)
    assert (chunks.most, chunks.made) == (2, 7)
    cache.fetch(6, 7)
    assert (chunks.alive, chunks.made) == (1, 7)
    cache.free()
    assert chunks.alive == 0


def test_a_prefetched_range_is_not_copied_again(chunks):
    cache = cache_of(8)
    cache.prefetch(0, 4)
    cache.prefetch(4, 8, device="cpu:0")
    held = [cache.fetch(0, 4, "cpu"), cache.fetch(4, 8)]
    assert chunks.alive == chunks.made == 2
    del held
    cache.fetch(0, 4)
    assert (chunks.alive, chunks.made) == (0, 3)


def test_without_a_budget_nothing_is_ahead(chunks):
    cache = cache_of(8, prefetch_bytes=0)
    cache.prefetch(0, 4)
    cache.prefetch(0, 8, chunk=2)
    assert chunks.made == 0
    assert cache.fetch(0, 2)[1, 0] == 32


def test_a_new_range_takes_the_place_of_the_last(chunks):
    cache = cache_of(12)
    cache.prefetch(0, 12, chunk=4)
    cache.prefetch(0, 8, chunk=2)
    assert (chunks.alive, chunks.made) == (4, 7)
    # and one that continues keeps what it has
    cache.prefetch(4, 12, chunk=2)
    assert (chunks.alive, chunks.made) == (4, 9)


def test_a_reader_that_is_faster_or_jumps_gets_the_rows(chunks):
    cache = cache_of(40, prefetch_bytes=4 * ROW)
    cache.prefetch(0, 40, chunk=2)
    for a, b in ((4, 6), (5, 9), (0, 2), (30, 40), (2, 4), (38, 40)):
        assert cache.fetch(a, b)[0, 0] == cache.fetch(a, a + 1)[0, 0]
        assert cache.prefetched_nbytes <= 4 * ROW
    assert chunks.alive <= 2


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["store", "prefetch", "fetch", "reader"])
def test_no_chunk_is_alive_after_an_exception(chunks, monkeypatch, where):
    """Case B44's sibling: wherever it is raised, chunks that nobody fetched included."""
    caches = []

    def step() -> None:
        if where == "store":
            monkeypatch.setattr("vocabtp.cache._pinned.HostRows.write", broken)
        with cache_of(40, prefetch_bytes=8 * ROW) as cache:
            caches.append(weakref.ref(cache))
            if where == "prefetch":
                monkeypatch.setattr("vocabtp.cache._pinned.HostRows.read", broken)
            cache.prefetch(0, 40, chunk=2)
            for start in range(0, 40, 2):
                if where == "fetch" and start == 6:
                    monkeypatch.setattr("vocabtp.cache._pinned.HostRows.read", broken)
                chunk = cache.fetch(start, start + 2)
                if where == "reader" and start == 6:
                    broken()
                del chunk

    def broken(*_, **__):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        step()
    if where != "reader":
        assert chunks.alive <= 2  # the frames of the traceback may hold the one at work
    del caught
    assert chunks.alive == 0
    assert chunks.most <= 5
    assert all(ref() is None for ref in caches)


class Device:
    """Memory for so many chunks; what is asked for beyond that is refused."""

    def __init__(self, monkeypatch, room):
        self.free, self.refused, plain = room, 0, TeacherCache._room

        def place(cache, key):
            if not self.free:
                self.refused += 1
                raise torch.OutOfMemoryError("out of memory")
            out = plain(cache, key)
            self.free -= 1
            weakref.finalize(out, self.back)
            return out

        monkeypatch.setattr(TeacherCache, "_room", place)

    def back(self):
        self.free += 1


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("room", "budget"), [(1, 2), (1, 10), (2, 3), (5, 10)])
def test_a_prefetch_that_finds_no_memory_does_not_happen(monkeypatch, room, budget):
    """Nor does it leave others less: fetch copies in place, one chunk at a time."""
    source = torch.arange(20 * 32.0).view(20, 32).bfloat16()
    cache = TeacherLogitCache.store(source, prefetch_bytes=budget * 2 * ROW)
    device = Device(monkeypatch, room)
    cache.prefetch(0, 20, chunk=2)
    assert (device.free, device.refused, cache.prefetched_nbytes) == (room, 1, 0)
    for start in range(0, 20, 2):
        chunk = cache.fetch(start, start + 2)
        assert torch.equal(chunk, source[start : start + 2])
        del chunk
    # and was not tried again, which costs an allocator what it keeps for others
    assert device.refused == 1


@pytest.mark.usefixtures("no_collector")
def test_a_fetch_goes_before_what_was_prefetched(monkeypatch):
    """A reader that holds chunks, or jumps, has the memory of those that wait."""
    source = torch.arange(40 * 32.0).view(40, 32).bfloat16()
    cache = TeacherLogitCache.store(source, prefetch_bytes=3 * 2 * ROW)
    device = Device(monkeypatch, 4)
    cache.prefetch(0, 40, chunk=2)
    held = [cache.fetch(0, 2), cache.fetch(2, 4)]
    assert (device.free, device.refused) == (0, 1)
    held.append(cache.fetch(30, 34))
    assert cache.prefetched_nbytes == 0
    held.append(cache.fetch(4, 6))
    for chunk, start in zip(held, (0, 2, 30, 4), strict=True):
        assert torch.equal(chunk, source[start : start + len(chunk)])
    # nobody else has any
    with pytest.raises(torch.OutOfMemoryError):
        cache.fetch(6, 8)


def test_arguments():
    cache = cache_of(8)
    for chunk in (1.0, True, "2"):
        with pytest.raises(TypeError, match=r"TeacherLogitCache\.prefetch: chunk must be an int"):
            cache.prefetch(0, 8, chunk=chunk)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        cache.prefetch(0, 8, chunk=0)
    with pytest.raises(ValueError, match="end=9"):
        cache.prefetch(0, 9, chunk=2)
    with pytest.raises(ValueError, match="prefetch_bytes must be at least 0, got -1"):
        cache_of(8, prefetch_bytes=-1)
    with pytest.raises(TypeError, match="prefetch_bytes must be an int"):
        cache_of(8, prefetch_bytes=1.5)
