"""Rows that an accelerator gets back from pinned memory, files and hidden states."""

from __future__ import annotations

import pytest
import torch

from accelerator_work import LAYOUTS, WIDTH, busy, device, noise, sleep
from vocabtp.cache import PinnedPool, TeacherHead, TeacherHiddenCache, TeacherLogitCache
from vocabtp.cache._streams import side_stream
from vocabtp.dist import VocabShard

pytestmark = pytest.mark.gpu


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
