"""Rows over the pieces of a pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import PinnedPool, TeacherLogitCache
from vocabtp.cache._pinned import HostRows


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    rows=st.integers(0, 40),
    width=st.integers(0, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    holes=st.lists(st.integers(1, 2000), max_size=6),
    stage=st.sampled_from([1, 300, 1 << 20]),
    data=st.data(),
)
def test_any_range_comes_back_from_any_pieces(rows, width, dtype, holes, stage, data):
    pool = PinnedPool()
    lent = [pool.lend(size) for size in holes]
    for segments in lent[::2]:
        pool.take_back(segments)
    source = torch.randn(rows, 2 * width)[:, ::2]
    cut = data.draw(st.integers(0, rows))
    start = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(start, rows))
    host = HostRows(rows, width, dtype, pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vocabtp.cache._pinned.STAGE_BYTES", stage)
        host.write(0, source[:cut])
        host.write(cut, source[cut:])
    out = torch.empty(end - start, width, dtype=dtype)
    host.read(start, out)
    assert torch.equal(out, source[start:end].to(dtype))


def test_release_gives_back_once():
    pool = PinnedPool()
    host = HostRows(3, 100, torch.float32, pool)
    host.release()
    host.release()
    other = HostRows(3, 100, torch.float32, pool)
    del host
    assert pool.used_nbytes == other.nbytes == 1216


@pytest.mark.usefixtures("poisoned")
def test_the_next_cache_waits_for_every_stream_that_used_the_memory(late):
    pool = PinnedPool()
    first, second = torch.randn(40, 64), torch.randn(40, 64)
    cache = TeacherLogitCache.store(first, dtype=torch.float32, pool=pool)
    others, chunks = [late.Stream(), late.Stream()], []
    for stream in (others[0], others[1], others[0]):
        with stream:
            chunks.append(cache.fetch(0, 40))
    events = set(cache._host._uses.values())
    assert len(events) == 3
    cache.free()
    assert all(event.query() for event in events)
    following = TeacherLogitCache.store(second, dtype=torch.float32, pool=pool)
    assert torch.equal(following.fetch(0, 40), second)
    assert all(torch.equal(chunk, first) for chunk in chunks)


def test_memory_is_not_written_before_its_readers_ended(late):
    """As above without poison, whose writer waits by itself."""
    pool = PinnedPool()
    first, second = torch.randn(40, 64), torch.randn(40, 64)
    cache = TeacherLogitCache.store(first, dtype=torch.float32, pool=pool)
    with late.Stream():
        chunk = cache.fetch(0, 40)
    cache.free()
    following = TeacherLogitCache.store(second, dtype=torch.float32, pool=pool)
    assert not torch.equal(chunk, first)
    assert torch.equal(following.fetch(0, 40), second)
    assert torch.equal(chunk, first)
