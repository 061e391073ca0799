"""Blocks of host memory: few wasted bytes, nothing for an allocator to round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache._pinned import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, HostRows, plan_blocks


@settings(deadline=None, derandomize=True, max_examples=200)
@given(rows=st.integers(0, 20_000), row_bytes=st.integers(0, 1 << 20))
def test_blocks_hold_every_row_and_waste_little(rows, row_bytes):
    blocks = plan_blocks(rows, row_bytes)
    payload = rows * row_bytes
    assert sum(block.rows for block in blocks) == (rows if row_bytes else 0)
    for block in blocks:
        assert block.rows * row_bytes <= block.nbytes <= MAX_BLOCK_BYTES
        assert block.nbytes & (block.nbytes - 1) == 0
    total = sum(block.nbytes for block in blocks)
    assert total - payload <= len(blocks) * row_bytes + MIN_BLOCK_BYTES


def test_a_large_cache_locks_what_it_holds():
    """Case B42: [4, 2112, 75968] in bf16, which one allocation would round to 2 GiB."""
    payload = 4 * 2112 * 75968 * 2
    assert payload == 1_283_555_328
    total = sum(block.nbytes for block in plan_blocks(4 * 2112, 75968 * 2))
    assert payload <= total <= 1.05 * payload


def test_varying_lengths_share_blocks():
    """Case B42: what an allocator must keep for 20 steps is little more than the longest."""
    pool: dict[int, int] = {}
    longest = 0
    for step in range(20):
        rows = 700 + 397 * (step * 7 % 20)
        need: dict[int, int] = {}
        for block in plan_blocks(rows, 75968 * 2):
            need[block.nbytes] = need.get(block.nbytes, 0) + 1
        longest = max(longest, rows * 75968 * 2)
        pool = {size: max(pool.get(size, 0), need.get(size, 0)) for size in pool | need}
    # one block of each smaller power of two beside the longest
    total = sum(size * count for size, count in pool.items())
    assert total <= longest + 2 * MAX_BLOCK_BYTES


def test_a_row_wider_than_a_block_gets_its_own():
    blocks = plan_blocks(3, MAX_BLOCK_BYTES + 2)
    assert [tuple(block) for block in blocks] == [(1, 2 * MAX_BLOCK_BYTES)] * 3


@pytest.mark.parametrize("start", [0, 1, 299, 300, 301, 640])
def test_ranges_cross_blocks(monkeypatch, start):
    """The pieces of several blocks, on pageable memory: the cut is the same."""
    monkeypatch.setattr("vocabtp.cache._pinned.torch.empty", _pageable)
    rows = torch.arange(700 * 1500, dtype=torch.float32).view(700, 1500)
    host = HostRows(700, 1500, torch.float32, pinned=True)
    assert len(host._parts) > 1
    host.write(0, rows[:300])
    host.write(300, rows[300:])
    out = torch.zeros(60, 1500)
    host.read(start, out)
    assert torch.equal(out, rows[start : start + 60])
    assert host.nbytes == sum(block.nbytes for block in plan_blocks(700, 6000))


_empty = torch.empty


def _pageable(*size, pin_memory=False, **kwargs):
    assert pin_memory
    return _empty(*size, **kwargs)
