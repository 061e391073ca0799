"""The pool: what is held follows the payloads in use, and nothing is lent twice."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import PinnedPool, TeacherLogitCache, default_pool
from vocabtp.cache.pool import ALIGNMENT, MAX_BLOCK_BYTES, PAGE_BYTES

_empty = torch.empty


@pytest.fixture
def blocks(monkeypatch):
    """Sizes of all blocks that pools allocate; the blocks themselves take no memory."""
    made = []

    def empty(*size, **kwargs):
        if kwargs.get("dtype") is torch.uint8:
            made.append(size[0])
        return _empty(*size, **kwargs)

    monkeypatch.setattr("vocabtp.cache.pool.torch.empty", empty)
    return made


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    scale=st.sampled_from([1, 1000, 1 << 20]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=25),
)
def test_lent_memory_is_nobody_elses_and_little_more_is_held(scale, steps):
    pool, lent, peak = PinnedPool(), [], 0
    for take, size in steps:
        if take or not lent:
            lent.append((size * scale, pool.lend(size * scale)))
        else:
            pool.take_back(lent.pop(size % len(lent))[1])
        used = sum(-(-need // ALIGNMENT) * ALIGNMENT for need, _ in lent)
        peak = max(peak, used)
        assert pool.used_nbytes == used
        assert pool.nbytes <= peak + max(peak // 128, PAGE_BYTES)
        spans = sorted((s.block, s.start, s.end) for _, segments in lent for s in segments)
        for (a, _, end), (b, start, _) in pairwise(spans):
            assert a != b or end <= start
        for need, segments in lent:
            assert need <= sum(pool.view(s).numel() for s in segments) < need + ALIGNMENT
    for _, segments in lent:
        pool.take_back(segments)
    assert pool.used_nbytes == 0
    pool.release()
    assert pool.nbytes == 0


def test_a_large_cache_locks_what_it_holds(blocks):
    """Case B42: [4, 2112, 75968] in bf16, which one allocation would round to 2 GiB."""
    payload = 4 * 2112 * 75968 * 2
    pool = PinnedPool()
    pool.lend(payload)
    assert payload <= pool.nbytes < 1.01 * payload
    assert sum(blocks) == pool.nbytes
    # powers of two are what an allocator does not round
    assert all(size & (size - 1) == 0 and size <= MAX_BLOCK_BYTES for size in blocks)
    assert len(blocks) <= 45


@pytest.mark.usefixtures("poisoned")
def test_memory_is_flat_over_1000_steps_of_random_lengths(blocks):
    lengths, longest = random.Random(0), 0
    pool = PinnedPool()
    for step in range(1000):
        rows = lengths.randint(1, 400)
        logits = torch.full((rows, 125), float(step))
        with TeacherLogitCache.store(logits, dtype=torch.float32, pool=pool) as cache:
            longest = max(longest, cache.nbytes)
            assert pool.nbytes <= 1.1 * longest + PAGE_BYTES
            assert cache.allocated_nbytes <= cache.nbytes + ALIGNMENT
            at = lengths.randrange(rows)
            assert (cache.fetch(at, rows) == step).all()
        if step == 300:
            steady = len(blocks)
    assert pool.nbytes <= 1.1 * longest
    assert len(blocks) <= steady + 1
    assert pool.used_nbytes == 0


def test_no_allocation_in_steady_state(blocks):
    """Two caches whose sum is what it was, however it is cut."""
    pool = PinnedPool()
    steady = None
    for rows in (500, 499, 500, 1, 250, 500):
        first = TeacherLogitCache.store(torch.zeros(rows, 64), pool=pool)
        second = TeacherLogitCache.store(torch.zeros(501 - rows, 64), pool=pool)
        first.free()
        second.free()
        steady = steady or list(blocks)
    assert blocks == steady


@pytest.mark.usefixtures("poisoned")
def test_a_cache_over_pieces_gives_its_rows():
    """Odd rows over fragments of every size; poison where one was handed back."""
    pool = PinnedPool()
    holes = [pool.lend(size) for size in (64, 6400, 128, 3000, 64, 12800, 4096, 192)]
    for hole in holes[::2]:
        pool.take_back(hole)
    logits = torch.randn(37, 123)
    caches = [TeacherLogitCache.store(logits + i, dtype=torch.float64, pool=pool) for i in range(3)]
    for i, cache in enumerate(caches):
        assert len(cache._host._parts) > 1 or i
        assert torch.equal(cache.fetch(0, 37), (logits + i).double())
        assert torch.equal(cache.fetch(13, 14), (logits + i).double()[13:14])
    chunk = caches[1].fetch(5, 9)
    caches[1].prefetch(0, 3)
    caches[1].free()
    assert torch.equal(chunk, (logits + 1).double()[5:9])
    assert torch.equal(caches[2].fetch(0, 37), (logits + 2).double())


def test_memory_comes_back_without_free_and_after_an_exception(monkeypatch):
    pool = PinnedPool()
    cache = TeacherLogitCache.store(torch.zeros(4, 64), pool=pool)
    assert pool.used_nbytes == 512
    del cache
    gc.collect()
    assert pool.used_nbytes == 0
    monkeypatch.setattr("vocabtp.cache.teacher.send", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        TeacherLogitCache.store(torch.zeros(4, 64), pool=pool)
    # at once, though the traceback still holds the frame
    assert caught.value.__traceback__ is not None
    assert pool.used_nbytes == 0


def test_the_limit_is_checked_before_anything_is_allocated(blocks):
    pool = PinnedPool(limit=100_000)
    held = TeacherLogitCache.store(torch.zeros(100, 300), pool=pool)
    before = list(blocks)
    with pytest.raises(
        ValueError,
        match=r"payload of 60000 bytes, with 60032 bytes in use by other caches, needs 12\d{4} "
        r"bytes of host memory, and the limit is 100000; free caches earlier, store fewer rows",
    ):
        TeacherLogitCache.store(torch.zeros(100, 300), pool=pool)
    assert blocks == before
    held.free()
    TeacherLogitCache.store(torch.zeros(100, 300), pool=pool).free()
    assert pool.nbytes <= pool.limit == 100_000
    # a payload that fits is not refused for its rounding
    tight = PinnedPool(limit=1_003_520)
    tight.lend(1_003_520)
    assert tight.nbytes == 1_003_520


class Copy:
    """A copy under way, as an event shows it."""

    def __init__(self):
        self.waited = False

    def query(self):
        return self.waited

    def synchronize(self):
        self.waited = True


def test_memory_is_not_written_before_its_last_copy_ended():
    pool = PinnedPool()
    copies = [Copy(), Copy()]
    cache = TeacherLogitCache.store(torch.zeros(40, 64), pool=pool)
    host = cache._host
    host._uses = dict(enumerate(copies))
    cache.free()
    # a smaller cache, then one that joins its piece with the rest of the block again
    small = TeacherLogitCache.store(torch.zeros(1, 64), pool=pool)
    assert all(copy.waited for copy in copies)
    copies[0].waited = copies[1].waited = False
    small._host._uses = {0: copies[1]}
    small.free()
    assert not copies[1].waited
    TeacherLogitCache.store(torch.zeros(40, 64), pool=pool)
    assert copies[1].waited


def test_page_locking_that_fails_warns_once(monkeypatch):
    def refused(*size, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("out of locked memory")
        return _empty(*size, **kwargs)

    pool = PinnedPool()
    pool._pinned = True
    monkeypatch.setattr("vocabtp.cache.pool.torch.empty", refused)
    logits = torch.randn(40, 1000)
    with pytest.warns(RuntimeWarning, match="could not be page-locked") as seen:
        cache = TeacherLogitCache.store(logits, pool=pool)
    assert len(seen) == 1
    assert not pool.pinned
    assert torch.equal(cache.fetch(0, 40), logits.bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TeacherLogitCache.store(logits, pool=pool)


def test_pinned_memory_is_asked_for(monkeypatch):
    asked = []

    def empty(*size, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        return _empty(*size, **kwargs)

    pool = PinnedPool()
    pool._pinned = True
    monkeypatch.setattr("vocabtp.cache.pool.torch.empty", empty)
    pool.lend(100)
    assert asked == [True]


def test_threads_share_a_pool():
    pool, wrong = PinnedPool(), []

    def work(value):
        for rows in range(1, 60):
            logits = torch.full((rows * value % 37 + 1, 50), float(value))
            with TeacherLogitCache.store(logits, pool=pool) as cache:
                if not (cache.fetch(0, len(cache)) == value).all():
                    wrong.append(rows)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.used_nbytes == 0


def test_only_free_blocks_are_released():
    pool = PinnedPool()
    logits = torch.randn(30, 40)
    cache = TeacherLogitCache.store(logits, pool=pool)
    TeacherLogitCache.store(torch.zeros(4000, 40), pool=pool).free()
    before = pool.nbytes
    pool.release()
    assert pool.used_nbytes <= pool.nbytes < before
    assert torch.equal(cache.fetch(0, 30), logits.bfloat16())
    TeacherLogitCache.store(torch.zeros(4000, 40), pool=pool)
    assert torch.equal(cache.fetch(0, 30), logits.bfloat16())


def test_the_default_pool_is_one_and_rows_from_the_cpu_do_not_need_it():
    assert default_pool() is default_pool()
    before = default_pool().nbytes
    cache = TeacherLogitCache.store(torch.zeros(100, 100))
    assert default_pool().nbytes == before
    assert cache.allocated_nbytes == cache.nbytes


def test_limits_are_ints():
    for wrong in (1.5, "1", True):
        with pytest.raises(TypeError, match="limit must be an int or None"):
            PinnedPool(limit=wrong)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        PinnedPool(limit=-1)


def test_a_pool_that_grew_in_inference_mode_serves_outside_it():
    """And the other way round, with chunks that autograd may keep."""
    pool = PinnedPool()
    logits = torch.randn(30, 40)
    weight = torch.ones(40, requires_grad=True)
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            cache = TeacherLogitCache.store(logits + 0, dtype=torch.float32, pool=pool)
        chunk = cache.fetch(0, 30)
        (chunk * weight).sum().backward()
        assert torch.equal(chunk, logits)
        cache.free()
    torch.testing.assert_close(weight.grad, 4 * logits.sum(0))


def test_host_memory_is_on_the_host_whatever_the_default_device(tmp_path):
    logits = torch.randn(30, 40)
    with torch.device("meta"):
        for pool in (None, PinnedPool()):
            cache = TeacherLogitCache.store(logits, dtype=torch.float32, pool=pool)
            assert torch.equal(cache.fetch(3, 30), logits[3:])
        cache.save(tmp_path)
        assert torch.equal(TeacherLogitCache.open(tmp_path).fetch(3, 30), logits[3:])
