"""TeacherHiddenCache: the head that a chunk meets when it is fetched."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import PinnedPool, TeacherHead, TeacherHiddenCache, TeacherLogitCache
from vocabtp.dist import VocabShard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def head_of(columns: int, width: int, dtype=torch.float32, **options) -> TeacherHead:
    return TeacherHead(weight=noise(columns, width, seed=1, dtype=dtype), **options)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    batch=st.sampled_from([None, 1, 3]),
    length=st.integers(0, 8),
    width=st.integers(1, 6),
    columns=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([None, *DTYPES]),
    shifted=st.booleans(),
    data=st.data(),
)
def test_fetch_is_the_head_of_what_was_stored(
    batch, length, width, columns, dtype, stored, shifted, data
):
    shape = (length + shifted, width) if batch is None else (batch, length + shifted, width)
    hidden = noise(*shape)[..., : length or None, :] if length else noise(*shape)[..., :0, :]
    head = head_of(columns, width, dtype)
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    pool = data.draw(st.sampled_from([None, PinnedPool()]))
    kept = hidden.clone().to(stored or hidden.dtype)
    cache = TeacherHiddenCache.store(hidden, head, dtype=stored, pool=pool)
    if data.draw(st.booleans()):
        cache.prefetch(start, end)
    got = cache.fetch(start, end)
    assert got.dtype == cache.dtype == dtype
    # not bit for bit: the product rounds by where its rows lie in memory
    torch.testing.assert_close(got, head(kept[..., start:end, :]))
    torch.testing.assert_close(cache.fetch(start, end, dtype=torch.float64).to(dtype), got)
    assert cache.shape == (*hidden.shape[:-1], columns)
    # bytes a row, on the host and ahead: those of the hidden state
    assert cache.row_nbytes == width * kept.element_size()
    assert cache.nbytes == kept.numel() * kept.element_size()
    cache.prefetch(start, end)
    assert cache.prefetched_nbytes == kept[..., start:end, :].numel() * kept.element_size()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_head_is_the_formula(bias, scale, softcap, dtype):
    weight, shift, hidden = noise(7, 5, seed=1), noise(7, seed=2), noise(4, 5)
    truth = hidden.double() @ weight.double().T
    truth = (truth + shift.double() * bias) * scale
    if softcap:
        truth = softcap * torch.tanh(truth / softcap)
    head = TeacherHead(
        weight=weight.to(dtype).requires_grad_(),
        bias=shift.to(dtype).requires_grad_() if bias else None,
        scale=scale,
        softcap=softcap,
    )
    found = TeacherHiddenCache.store(hidden.requires_grad_(), head).fetch(0, 4)
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
    if softcap:
        assert float(found.abs().max()) <= softcap


def test_the_head_computes_in_its_own_dtype_inside_autocast():
    weight, hidden = torch.randn(9, 16), torch.randn(4, 16)
    head = TeacherHead(weight=weight)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
    assert torch.equal(logits, hidden @ weight.t())


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("width", [64, 896])
def test_columns_are_those_of_the_stored_logits_to_one_rounding(width, chunk):
    """bf16 hidden states of a bf16 model are exact: what differs is the order of a sum."""
    hidden = noise(64, width, dtype=torch.bfloat16)
    head = TeacherHead(weight=noise(500, width, seed=1, dtype=torch.bfloat16) / 30)
    logits = TeacherLogitCache.store(head(hidden))
    cache = TeacherHiddenCache.store(hidden, head)
    for start in range(0, 64, chunk):
        a, b = (
            c.fetch(start, min(64, start + chunk), dtype=torch.float64) for c in (cache, logits)
        )
        # one unit in the last of bf16's eight bits, and sums in fp32 near 0
        assert ((a - b).abs() <= 2.0**-7 * b.abs() + 1e-5).all()


def test_every_rank_applies_its_own_columns():
    hidden, weight = noise(6, 5), noise(11, 5, seed=1)
    whole = TeacherHiddenCache.store(hidden, TeacherHead(weight=weight)).fetch(0, 6)
    for start, end in ((0, 4), (4, 4), (4, 11)):
        shard = VocabShard(start, end, 11)
        cache = TeacherHiddenCache.store(hidden, TeacherHead(weight=weight[start:end]), shard)
        assert cache.shape == (6, end - start)
        found = cache.fetch(2, 5, shard=shard)
        torch.testing.assert_close(found, whole[2:5, start:end])
        with pytest.raises(ValueError, match=r"TeacherHiddenCache\.fetch: the shard must be"):
            cache.fetch(0, 1, shard=VocabShard(0, 11, 11))


def test_what_is_saved_is_the_columns(tmp_path):
    """Another TP size reads them, without the head."""
    hidden, weight = noise(3, 7, 5), noise(12, 5, seed=1)
    for start, end in ((0, 5), (5, 12)):
        head = TeacherHead(weight=weight[start:end], softcap=2.0)
        with TeacherHiddenCache.store(hidden, head, VocabShard(start, end, 12)) as cache:
            cache.save(tmp_path)
    truth = TeacherHiddenCache.store(hidden, TeacherHead(weight=weight, softcap=2.0)).fetch(2, 7)
    opened = TeacherLogitCache.open(tmp_path)
    torch.testing.assert_close(opened.fetch(2, 7), truth)
    opened = TeacherLogitCache.open(tmp_path, VocabShard(3, 9, 12))
    torch.testing.assert_close(opened.fetch(2, 7), truth[..., 3:9])


def test_free_lets_go_of_the_head():
    gc.collect()
    gc.disable()
    try:
        head = head_of(4, 3)
        gone = weakref.ref(head)
        cache = TeacherHiddenCache.store(noise(5, 3), head)
        cache.prefetch(0, 5, chunk=2)
        del head
        assert gone() is not None
        cache.free()
        assert gone() is None
        with pytest.raises(ValueError, match=r"TeacherHiddenCache\.fetch: the cache was freed"):
            cache.fetch(0, 1)
        assert (cache.shape, cache.nbytes, cache.payload) == ((5, 4), 60, "hidden")
        assert repr(cache) == "TeacherHiddenCache([5, 4], torch.float32, freed)"
    finally:
        gc.enable()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("donate", [False, True])
def test_streams_are_those_of_every_cache(late, donate):
    hidden, head, pool = noise(40, 6), head_of(9, 6), PinnedPool()
    truth = head(hidden)
    for _ in range(2):
        source = hidden.clone()
        cache = TeacherHiddenCache.store(
            source, head, pool=pool, donate=donate, prefetch_bytes=15 * 24
        )
        if not donate:
            source.zero_()
        cache.prefetch(0, 40, chunk=5)
        got = [cache.fetch(start, start + 5) for start in range(0, 40, 5)]
        cache.free()
        torch.testing.assert_close(torch.cat(got), truth)


def test_a_chunk_can_be_saved_for_backward_whatever_mode_it_was_made_in():
    hidden, head = noise(4, 3), head_of(5, 3)
    with torch.inference_mode():
        cache = TeacherHiddenCache.store(hidden + 0, head)
        chunk = cache.fetch(0, 4)
    weight = torch.ones(5, requires_grad=True)
    (chunk * weight).sum().backward()
    torch.testing.assert_close(weight.grad, head(hidden).sum(0))


def test_arguments():
    hidden, head = noise(4, 3), head_of(5, 3)
    store = TeacherHiddenCache.store
    with pytest.raises(TypeError, match="head must be a TeacherHead, got Tensor"):
        store(hidden, head.weight)
    with pytest.raises(TypeError, match="hidden must be a tensor, got list"):
        store([[1.0]], head)
    with pytest.raises(TypeError, match=r"dtype must be bfloat16, .*got torch.float8_e4m3fn"):
        store(hidden.to(torch.float8_e4m3fn), head)
    with pytest.raises(ValueError, match=r"hidden must be \[rows, H\] or \[B, T, H\]"):
        store(hidden[0], head)
    with pytest.raises(ValueError, match=r"the 3 numbers a row .*\[5, 3\] takes, got \[4, 2\]"):
        store(hidden[:, :2], head)
    with pytest.raises(ValueError, match=r"width, 4 for columns \[0, 4\) of 9"):
        store(hidden, head, VocabShard(0, 4, 9))


def test_heads():
    weight = noise(5, 3)
    with pytest.raises(TypeError, match="weight must be a plain tensor, got NoneType"):
        TeacherHead(weight=None)
    with pytest.raises(TypeError, match=r"weight must be floating, got torch\.int64"):
        TeacherHead(weight=torch.ones(5, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weight must be \[L, H\], got \[5\]"):
        TeacherHead(weight=weight[:, 0])
    for bias in (noise(4), noise(5, 1), noise(5).double()):
        with pytest.raises(ValueError, match=r"bias must be \[5\] torch\.float32 on cpu, got"):
            TeacherHead(weight=weight, bias=bias)
    for softcap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap must be above 0"):
            TeacherHead(weight=weight, softcap=softcap)
