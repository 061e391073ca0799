"""Copies both ways on side streams that are as late as they may be; see `Late` in conftest."""

from __future__ import annotations

import pytest
import torch

from vocabtp.cache import PinnedPool, TeacherLogitCache
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import side_stream
from vocabtp.cache.pool import PAGE_BYTES
from vocabtp.dist import VocabShard


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "shifted": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))[..., :-1, :],
    "transposed": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("stage", [1, 200, 1000, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(41, 13), (5, 9, 13), (0, 3), (3, 0, 2)])
def test_source_may_be_overwritten_while_its_copies_wait(late, monkeypatch, shape, layout, stage):
    monkeypatch.setattr("vocabtp.cache._pinned.STAGE_BYTES", stage)
    source, pool = LAYOUTS[layout](noise(*shape)), PinnedPool()
    kept = source.clone()
    for _ in range(2):
        cache = TeacherLogitCache.store(source, dtype=torch.float32, pool=pool)
        source.zero_()
        late.home.wait_stream(late.current)
        assert torch.equal(cache.fetch(0, len(cache)), kept)
        source += kept
        cache.free()


def test_store_does_not_wait_for_its_copies(late):
    """Up to the buffers; the last copies of a larger source too, and a donated one whole."""
    source, pool = noise(64, 32), PinnedPool()
    TeacherLogitCache.store(source, pool=pool)
    assert [len(stream.queue) > 0 for stream in late.streams] == [False, True]
    cache = TeacherLogitCache.store(source, dtype=torch.float32, pool=pool, donate=True)
    # the copies read the source itself
    source.zero_()
    assert (cache.fetch(0, 64) == 0).all()


@pytest.mark.parametrize("stage", [1, 1 << 20])
@pytest.mark.parametrize("donate", [False, True])
def test_what_the_copies_read_outlasts_them(late, monkeypatch, donate, stage):
    """The allocator is told of the side stream before `store` returns."""
    monkeypatch.setattr("vocabtp.cache._pinned.STAGE_BYTES", stage)
    source = noise(20, 8)
    TeacherLogitCache.store(source, dtype=torch.float32, pool=PinnedPool(), donate=donate)
    side = late.streams[1]
    assert {stream for _, stream in late.recorded} == {side}
    rooms = [tensor for tensor, _ in late.recorded]
    if donate:
        assert [room.data_ptr() for room in rooms] == [source.data_ptr()]
    else:
        assert len(rooms) == (8 if stage == 1 else 1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("budget", [0, 100, 300, 1 << 20])
@pytest.mark.parametrize("shape", [(41, 13), (3, 41, 13)])
@pytest.mark.parametrize("planned", [False, True])
def test_prefetched_chunks_are_the_source(late, shape, budget, planned):
    source, pool = noise(*shape), PinnedPool()
    kept = source.clone()
    cache = TeacherLogitCache.store(
        source, dtype=torch.float32, pool=pool, prefetch_bytes=budget * shape[0]
    )
    source.zero_()
    if planned:
        cache.prefetch(0, 41, chunk=4)
    got = []
    for start in range(0, 41, 4):
        end = min(41, start + 4)
        if not planned and end < 41:
            cache.prefetch(end, min(41, end + 4))
        got.append(cache.fetch(start, end))
    assert torch.equal(torch.cat(got, dim=-2), kept)


def test_a_prefetch_does_not_wait(late):
    cache = TeacherLogitCache.store(noise(8, 4), dtype=torch.float32, pool=PinnedPool())
    cache.prefetch(0, 8, chunk=2)
    assert [len(stream.queue) > 0 for stream in late.streams] == [False, True, True]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("stored", [False, True])
def test_free_with_copies_under_way(late, stored):
    """To the host, to the device and waiting; the next cache has the same memory."""
    pool = PinnedPool()
    for _ in range(3):
        first, second = noise(40, 16), noise(40, 16) + 1
        kept = first.clone()
        cache = TeacherLogitCache.store(first, dtype=torch.float32, pool=pool)
        if stored:
            late.streams[1].work(late.streams[1].given)
        cache.prefetch(0, 40, chunk=10)
        chunk = cache.fetch(0, 10)
        cache.prefetch(20, 40)
        cache.free()
        assert torch.equal(chunk, kept[:10])
        following = TeacherLogitCache.store(second, dtype=torch.float32, pool=pool)
        assert torch.equal(following.fetch(0, 40), second)
        following.free()
    assert pool.used_nbytes == 0


def test_free_at_once_leaves_the_memory_to_the_copies(late):
    """Nobody waited for anything: the next cache's copies come behind those of the last."""
    pool = PinnedPool()
    first, second = noise(40, 16), noise(40, 16) + 1
    with late.Stream():
        TeacherLogitCache.store(first, dtype=torch.float32, pool=pool).free()
        cache = TeacherLogitCache.store(second, dtype=torch.float32, pool=pool)
    assert torch.equal(cache.fetch(0, 40), second)
    assert pool.nbytes < 2 * cache.nbytes


@pytest.mark.parametrize("prefetched", [False, True])
def test_fetch_on_another_stream(late, prefetched):
    source = noise(40, 16)
    kept = source.clone()
    cache = TeacherLogitCache.store(source, dtype=torch.float32, pool=PinnedPool())
    source.zero_()
    if prefetched:
        cache.prefetch(0, 40)
    other = late.Stream()
    late.recorded.clear()
    with other:
        chunk = cache.fetch(0, 40)
    # a prefetched chunk's memory is of the stream that was current then
    assert [stream for _, stream in late.recorded] == [other] * prefetched
    late.home.wait_stream(other)
    assert torch.equal(chunk, kept)


@pytest.mark.parametrize("planned", [False, True])
def test_a_dropped_prefetch_counts_until_its_copy_ended(late, planned):
    """Its memory cannot go to another chunk before, so that the device would hold both."""
    cache = TeacherLogitCache.store(noise(40, 16), pool=PinnedPool(), prefetch_bytes=10 * 32)
    chunk = {"chunk": 10} if planned else {}
    late.recorded.clear()
    cache.prefetch(0, 10, **chunk)
    side = late.streams[2]
    cache.prefetch(10, 20, **chunk)
    assert cache.prefetched_nbytes == 10 * 32
    side.work(side.given)
    assert cache.prefetched_nbytes == 10 * 32 * (not planned)
    cache.prefetch(10, 20, **chunk)
    assert [key[:2] for key in cache._ahead._arrivals] == [(10, 20)]
    # what had arrived was free at once, whatever the stream has to do now
    assert late.recorded == []
    cache.free()
    assert [stream for _, stream in late.recorded] == [side]


def test_a_side_stream_is_an_object_of_its_callers_own(late):
    """Entered, it remembers what was current before: two threads in one would mix that up."""
    device = torch.device("cpu")
    first, second = side_stream(device, "in"), side_stream(device, "in")
    assert first is not second
    assert first.stream_id == second.stream_id != side_stream(device, "out").stream_id


def test_room_of_a_copy_that_failed_outlasts_what_was_queued(late, monkeypatch):
    cache = TeacherLogitCache.store(noise(40, 16), pool=PinnedPool())
    read, calls = HostRows.read, []

    def broken(host, start, out):
        read(host, start, out)
        calls.append(out.data_ptr())
        if len(calls) == 2:
            raise RuntimeError("broken")

    monkeypatch.setattr(HostRows, "read", broken)
    late.recorded.clear()
    with pytest.raises(RuntimeError, match="broken"):
        cache.prefetch(0, 40, chunk=10)
    side = late.streams[2]
    assert [(t.data_ptr(), stream) for t, stream in late.recorded] == [(calls[1], side)]
    monkeypatch.setattr(HostRows, "read", read)
    cache.free()
    assert [t.data_ptr() for t, _ in late.recorded] == calls[::-1]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shards", [1, 2])
def test_a_prefetch_of_saved_rows_does_not_wait_for_those_before(tmp_path, late, shards):
    """Each chunk has host memory of its own until its copy ended; with poison behind that."""
    kept, pool = noise(40, 160), PinnedPool()
    for i in range(shards):
        shard = VocabShard(160 * i // shards, 160 * (i + 1) // shards, 160)
        part = TeacherLogitCache.store(kept[:, shard.start : shard.end], shard, torch.float32)
        part.save(tmp_path)
    size = 10 * 160 * 4
    cache = TeacherLogitCache.open(tmp_path, pool=pool, prefetch_bytes=3 * size)
    cache.prefetch(0, 40, chunk=10)
    assert pool.used_nbytes == 3 * size
    side = late.streams[2 if len(late.streams) > 2 else 1]
    side.work(side.given)
    chunks = [cache.fetch(0, 10)]
    # the first three left, the fourth is on its way
    assert pool.used_nbytes == size
    chunks += [cache.fetch(start, start + 10) for start in (10, 20, 30)]
    assert torch.equal(torch.cat(chunks), kept)
    # a host that is ahead of a stream: never more than the rows of the entry
    other = late.Stream()
    with other:
        chunks = [cache.fetch(start, start + 20) for start in (0, 20) * 3]
    assert pool.nbytes <= 4 * size + PAGE_BYTES
    other.work(other.given)
    assert torch.equal(torch.cat(chunks), kept.repeat(3, 1))
    cache.prefetch(0, 40, chunk=10)
    cache.free()
    assert pool.used_nbytes == 0


@pytest.mark.usefixtures("poisoned")
def test_saved_rows_come_through_as_little_memory_as_the_pool_has(tmp_path, late):
    kept = noise(64, 64)
    TeacherLogitCache.store(kept, dtype=torch.float32).save(tmp_path)
    # that of one chunk
    cache = TeacherLogitCache.open(tmp_path, pool=PinnedPool(limit=16 * 64 * 4))
    cache.prefetch(0, 64, chunk=16)
    got = [cache.fetch(start, start + 16) for start in range(0, 64, 16)]
    assert torch.equal(torch.cat(got), kept)
    with pytest.raises(ValueError, match="the limit is 4096"):
        cache.fetch(0, 17)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("shape", [(40, 16), (2, 20, 16)])
def test_rows_come_back_before_the_last_have_left(late, monkeypatch, shape, donate):
    """A chunk waits for its own rows only: the bus carries both ways at once."""
    monkeypatch.setattr("vocabtp.cache._pinned.STAGE_BYTES", 4 * 64)
    source = noise(*shape)
    kept = source.clone()
    cache = TeacherLogitCache.store(source, dtype=torch.float32, pool=PinnedPool(), donate=donate)
    out = late.streams[1]
    cache.prefetch(0, 20, chunk=5)
    first = cache.fetch(0, 5)
    assert torch.equal(first, kept[..., :5, :])
    # of [B, T, L] also the first five of the second sequence
    assert out.done < out.given
    chunks = [first, *(cache.fetch(start, start + 5) for start in range(5, len(cache), 5))]
    assert torch.equal(torch.cat(chunks, dim=-2), kept)


@pytest.mark.parametrize("donate", [False, True])
def test_copies_come_behind_what_the_current_stream_was_given(late, donate):
    """Rows that are still being made; and rooms that a reader is still using."""
    made, source = noise(40, 16), torch.zeros(40, 16)
    with late.Stream():
        other = late.current
        source.copy_(made)
        cache = TeacherLogitCache.store(
            source, dtype=torch.float32, pool=PinnedPool(), donate=donate
        )
        if not donate:
            source.copy_(noise(40, 16) + 1)
        cache.prefetch(0, 20)
        late.current = late.home
        assert torch.equal(cache.fetch(20, 40), made[20:])
        late.current = other
        reader = torch.zeros(3)
        reader.copy_(torch.ones(3))
        cache.prefetch(20, 40)
        side = late.streams[3]
        side.work(side.given)
        assert (reader == 1).all()
    assert torch.equal(cache.fetch(0, 20), made[:20])
    assert torch.equal(cache.fetch(20, 40), made[20:])
