"""Which copies are made: few, of whole ranges, in the stored dtype, straight out of the pool."""

from __future__ import annotations

import pytest
import torch

from vocabtp.cache import PinnedPool, TeacherHead, TeacherHiddenCache, TeacherLogitCache

L = 24


class Copies:
    """Every `Tensor.copy_`: its tensors, and whether the host was to wait for it."""

    def __init__(self, monkeypatch):
        self.made, plain = [], torch.Tensor.copy_

        def copy(target, source, non_blocking=False):
            self.made.append((target, source, non_blocking))
            return plain(target, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", copy)

    def taken(self):
        made, self.made = self.made, []
        return made


@pytest.fixture
def copies(late, monkeypatch):
    return Copies(monkeypatch)


def inside(tensor: torch.Tensor, *owners: torch.Tensor) -> bool:
    """Whether its memory is that of one of these."""
    return tensor.untyped_storage().data_ptr() in [o.untyped_storage().data_ptr() for o in owners]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_chunk_is_one_copy_a_sequence_out_of_the_pool(copies, batch, stored, kind, ahead):
    """Packed rows: one. No other memory of the host is used, and nothing is converted there."""
    source = torch.randn(40, L) if batch is None else torch.randn(batch, 40, L)
    pool = PinnedPool()
    # one block, of which all of it is cut
    pool.take_back(pool.lend(1 << 14))
    if kind == "hidden":
        head = TeacherHead(weight=torch.randn(9, L))
        cache = TeacherHiddenCache.store(source, head, dtype=stored, pool=pool)
        truth = head(source.to(stored))
    else:
        cache = TeacherLogitCache.store(source, dtype=stored, pool=pool)
        truth = source.to(stored)
    blocks = list(pool._blocks.values())
    for target, rows, non_blocking in copies.taken():
        if inside(target, *blocks):
            assert (target.dtype, rows.dtype, non_blocking) == (stored, stored, True)
    # the last chunk is a part of one
    for start, end in ((0, 16), (16, 32), (32, 40)):
        if ahead:
            cache.prefetch(start, end)
        got = cache.fetch(start, end, dtype=torch.float64)
        made = copies.taken()
        assert len(made) == (batch or 1)
        for target, rows, non_blocking in made:
            assert inside(rows, *blocks)
            assert inside(target, made[0][0])
            assert target.is_contiguous()
            assert rows.is_contiguous()
            assert (target.dtype, rows.dtype, non_blocking) == (stored, stored, True)
        assert sum(target.numel() for target, *_ in made) == (batch or 1) * (end - start) * L
        torch.testing.assert_close(got, truth[..., start:end, :].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_row_takes_its_numbers(dtype):
    cache = TeacherLogitCache.store(torch.randn(3, 5, L), dtype=dtype)
    assert cache.row_nbytes == L * dtype.itemsize
    assert cache.nbytes == 15 * L * dtype.itemsize


@pytest.mark.parametrize("rows", [1, 7, 100, 3000, 50_000])
def test_host_bytes_are_those_of_the_rows(rows):
    """Exactly, up to the 64 bytes that a piece begins at; a pool holds a page or 1% more."""
    pool = PinnedPool()
    cache = TeacherLogitCache.store(torch.zeros(rows, L), pool=pool)
    assert cache.nbytes == rows * L * 2
    assert cache.nbytes <= cache.allocated_nbytes < cache.nbytes + 64
    assert pool.nbytes < 1.01 * cache.nbytes + 4096
