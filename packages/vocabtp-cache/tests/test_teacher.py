"""TeacherLogitCache on the CPU: what goes in comes out, and nothing stays behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vocabtp.cache import PinnedPool, TeacherLogitCache
from vocabtp.dist import VocabShard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STORED = st.sampled_from(DTYPES)
STRIDES = ("contiguous", "shifted", "transposed", "every other column", "expanded")

property_test = settings(deadline=None, derandomize=True, max_examples=60)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with the values that a comparison easily misses."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 30
    flat = x.view(-1)
    for at, value in enumerate((float("inf"), float("-inf"), float("nan"), -0.0, 1e-40)):
        if at < flat.numel():
            flat[at] = value
    return x.to(dtype)


def laid_out(x: Tensor, how: str) -> Tensor:
    """The values of x in another layout; "expanded" repeats its first row."""
    if how == "shifted":  # as logits[:, :-1]
        wide = torch.zeros(*x.shape[:-2], x.shape[-2] + 1, x.shape[-1], dtype=x.dtype)
        wide[..., :-1, :] = x
        return wide[..., :-1, :]
    if how == "transposed":
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if how == "every other column":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "expanded" and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


def fragmented() -> PinnedPool:
    """A pool of which three holes of 192 bytes are free."""
    pool = PinnedPool()
    lent = [pool.lend(64) for _ in range(12)]
    for at, segments in enumerate(lent):
        if at % 4:
            pool.take_back(segments)
    # the rest of the block
    pool.lend(pool.nbytes - pool.used_nbytes - 9 * 64)
    return pool


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, NaN payloads and signs of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


@property_test
@given(
    rows=st.integers(0, 9),
    width=st.integers(0, 7),
    dtype=STORED,
    source=STORED,
    layout=st.sampled_from(STRIDES),
    data=st.data(),
)
def test_rows_come_back_bit_for_bit(rows, width, dtype, source, layout, data):
    logits = laid_out(noise(rows, width, dtype=source), layout)
    kept = logits.clone().to(dtype)
    start = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(start, rows))
    pool = data.draw(st.sampled_from([None, fragmented()]))
    lent = pool.used_nbytes if pool else 0
    cache = TeacherLogitCache.store(logits, dtype=dtype, pool=pool)
    if data.draw(st.booleans()):
        cache.prefetch(start, end)
    assert same_bits(cache.fetch(start, end), kept[start:end])
    assert (cache.shape, cache.dtype, len(cache)) == (logits.shape, dtype, rows)
    assert cache.nbytes == rows * width * dtype.itemsize
    assert cache.allocated_nbytes == (pool.used_nbytes - lent if pool else cache.nbytes)


@property_test
@given(
    batch=st.integers(0, 4),
    length=st.integers(0, 6),
    width=st.integers(0, 5),
    dtype=STORED,
    layout=st.sampled_from(STRIDES),
    data=st.data(),
)
def test_positions_of_all_sequences_come_back_bit_for_bit(
    batch, length, width, dtype, layout, data
):
    logits = laid_out(noise(batch, length, width), layout)
    kept = logits.clone().to(dtype)
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    pool = data.draw(st.sampled_from([None, fragmented()]))
    cache = TeacherLogitCache.store(logits, dtype=dtype, pool=pool)
    if data.draw(st.booleans()):
        cache.prefetch(start, end)
    assert same_bits(cache.fetch(start, end), kept[:, start:end])
    assert len(cache) == length


@property_test
@given(data=st.data())
def test_any_order_of_prefetch_and_fetch_gives_the_source(data):
    logits = noise(6, 3)
    kept = logits.to(torch.bfloat16)
    cache = TeacherLogitCache.store(logits)
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, 6))
        end = data.draw(st.integers(start, 6))
        if data.draw(st.booleans()):
            cache.prefetch(start, end)
        else:
            assert same_bits(cache.fetch(start, end), kept[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_fetch_converts_the_stored_number(stored, dtype):
    logits = noise(4, 5)
    cache = TeacherLogitCache.store(logits, dtype=stored)
    assert same_bits(cache.fetch(1, 3, dtype=dtype), logits.to(stored).to(dtype)[1:3])
    cache.prefetch(1, 3)
    assert same_bits(cache.fetch(1, 3, dtype=dtype), logits.to(stored).to(dtype)[1:3])


def test_default_dtype_is_bfloat16():
    assert TeacherLogitCache.store(noise(2, 2)).fetch(0, 2).dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_source_may_be_overwritten_after_store(shape):
    logits = noise(*shape, dtype=torch.bfloat16)
    kept = logits.clone()
    cache = TeacherLogitCache.store(logits)
    logits.zero_()
    assert same_bits(cache.fetch(0, 3), kept)


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (2, 3, 4)])
def test_a_fetched_chunk_belongs_to_the_caller(shape, prefetched):
    logits = noise(*shape, dtype=torch.bfloat16)
    cache = TeacherLogitCache.store(logits)
    for _ in range(2):
        if prefetched:
            cache.prefetch(0, 3)
        chunk = cache.fetch(0, 3)
        assert same_bits(chunk, logits)
        chunk.zero_()
    assert same_bits(cache.fetch(0, 3), logits)


def test_store_detaches():
    logits = noise(2, 3).requires_grad_()
    chunk = TeacherLogitCache.store(logits * 1.0, dtype=torch.float32).fetch(0, 2)
    assert not chunk.requires_grad
    assert same_bits(chunk, logits.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_chunk_can_be_saved_for_backward_whatever_mode_it_was_made_in(mode):
    logits = noise(3, 4).nan_to_num(0, 0, 0)
    with mode():
        cache = TeacherLogitCache.store(logits * 1.0, dtype=torch.float32)
        cache.prefetch(0, 2)
        chunks = [cache.fetch(0, 2), cache.fetch(2, 3)]
        cache.prefetch(0, 1)
    chunks.append(cache.fetch(0, 1))
    weight = torch.ones(4, requires_grad=True)
    sum((chunk * weight).sum() for chunk in chunks).backward()
    torch.testing.assert_close(weight.grad, logits.sum(0) + logits[0])


def test_ranges_must_be_ints():
    cache = TeacherLogitCache.store(noise(4, 2))
    for start, end in ((0.0, 2), (0, 2.0), ("0", 2), (None, 2), (True, 2), (0, torch.tensor(2))):
        for method in (cache.fetch, cache.prefetch):
            with pytest.raises(TypeError, match=r"(fetch|prefetch): (start|end) must be an int"):
                method(start, end)


@pytest.mark.parametrize("shape", [(4, 2), (7, 4, 2)])
def test_ranges_must_lie_inside(shape):
    cache = TeacherLogitCache.store(noise(*shape))
    for start, end in ((-1, 2), (0, 5), (3, 2), (5, 5), (-2, -1)):
        for method in (cache.fetch, cache.prefetch):
            with pytest.raises(ValueError, match=f"<= 4, got start={start}, end={end}"):
                method(start, end)
    assert cache.fetch(4, 4).numel() == 0


def test_fetch_checks_the_dtype():
    cache = TeacherLogitCache.store(noise(4, 2))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        cache.fetch(0, 1, dtype=torch.int64)


SHARD = VocabShard(start=3, end=7, global_size=11, tp_group=None)


@pytest.mark.parametrize(
    "other",
    [
        VocabShard(start=4, end=8, global_size=11, tp_group=None),
        VocabShard(start=3, end=7, global_size=12, tp_group=None),
    ],
)
def test_another_shard_is_refused(other):
    logits = noise(2, 4)
    cache = TeacherLogitCache.store(logits, SHARD)
    assert cache.shard == SHARD
    with pytest.raises(ValueError, match=r"\[3, 7\) of 11, got columns"):
        cache.fetch(0, 2, shard=other)
    same = VocabShard(start=3, end=7, global_size=11, tp_group=None)
    assert same_bits(cache.fetch(0, 2, shard=same), logits.to(torch.bfloat16))


def test_a_shard_is_refused_where_the_cache_has_none():
    cache = TeacherLogitCache.store(noise(2, 4))
    with pytest.raises(ValueError, match="no shard, got columns"):
        cache.fetch(0, 2, shard=SHARD)


@pytest.mark.parametrize("shape", [(2, 11), (2, 3), (1, 2, 11)])
def test_width_must_be_the_shards(shape):
    with pytest.raises(ValueError, match=r"width, 4 for columns \[3, 7\) of 11, got"):
        TeacherLogitCache.store(noise(*shape), SHARD)


def test_store_refuses_what_it_cannot_keep():
    store = TeacherLogitCache.store
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        store([[0.0]])
    with pytest.raises(TypeError, match=r"must be floating, got torch\.int64"):
        store(torch.ones(2, 2, dtype=torch.int64))
    for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="dtype must be bfloat16"):
            store(noise(2, 2), dtype=dtype)
    for shape in ((), (2,), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"must be \[rows, L\] or \[B, T, L\], got"):
            store(torch.zeros(shape))
    with pytest.raises(TypeError, match="must be a VocabShard, got tuple"):
        store(noise(2, 2), (0, 2))


def test_free_ends_every_read():
    logits = noise(4, 2)
    cache = TeacherLogitCache.store(logits)
    before = cache.fetch(0, 4)
    cache.prefetch(0, 2)
    cache.prefetch(2, 4)
    assert not cache.closed
    cache.free()
    cache.free()
    assert cache.closed
    assert cache.allocated_nbytes == 0
    for read in (lambda: cache.fetch(0, 2), lambda: cache.prefetch(0, 2), cache.__enter__):
        with pytest.raises(ValueError, match="the cache was freed"):
            read()
    # what was handed out stays
    assert same_bits(before, logits.to(torch.bfloat16))
    assert (cache.shape, cache.dtype, len(cache), cache.nbytes) == ((4, 2), torch.bfloat16, 4, 16)


def test_a_fetched_prefetch_survives_free():
    logits = noise(4, 2)
    cache = TeacherLogitCache.store(logits)
    cache.prefetch(1, 4)
    chunk = cache.fetch(1, 4)
    cache.free()
    gc.collect()
    assert same_bits(chunk, logits[1:4].to(torch.bfloat16))


def test_context_frees_on_exceptions():
    with TeacherLogitCache.store(noise(2, 2)) as cache:
        assert not cache.closed
    assert cache.closed
    cache = TeacherLogitCache.store(noise(2, 2))
    cache.prefetch(0, 1)
    with pytest.raises(ValueError, match="end=3"), cache:
        cache.fetch(0, 3)
    assert cache.closed
    assert cache.allocated_nbytes == 0


class Count:
    """How many of the tensors and caches shown to it are alive, now and at most."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def __call__(self, thing):
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(thing, self._gone)
        return thing

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("fails_at", [None, 5])
def test_at_most_one_micro_batch_is_alive(fails_at):
    """Case B44: eight micro-batches, one cache at a time, none after the step or an error."""
    caches = Count()

    def step() -> None:
        for micro in range(8):
            logits = noise(1, 64, 4096, seed=micro)
            with caches(TeacherLogitCache.store(logits)) as cache:
                for start in range(0, 64, 8):
                    if start + 16 <= 64:
                        cache.prefetch(start + 8, start + 16)
                    chunk = cache.fetch(start, start + 8, dtype=torch.float32)
                    if micro == fails_at:
                        raise RuntimeError("the loss failed")
                    assert chunk.shape == (1, 8, 4096)
            del cache

    # without the cycle collector: nothing may hang on one
    gc.disable()
    try:
        if fails_at is None:
            step()
        else:
            with pytest.raises(RuntimeError, match="the loss failed"):
                step()
    finally:
        gc.enable()
    assert caches.peak == 1
    assert caches.alive == 0


def test_repr_tells_what_it_is():
    cache = TeacherLogitCache.store(noise(2, 3))
    assert repr(cache) == "TeacherLogitCache([2, 3], torch.bfloat16)"
    cache.free()
    assert repr(cache) == "TeacherLogitCache([2, 3], torch.bfloat16, freed)"
