"""Rows over the pieces of a pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import PinnedPool
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
