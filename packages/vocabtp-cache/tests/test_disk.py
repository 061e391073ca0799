"""Caches on disk: what was saved comes back, at any cut, as one cache or as a stream of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saved_caches import LOGITS, V, cut, same_bits, save
from vocabtp.cache import TeacherLogitCache, TeacherLogitStream
from vocabtp.dist import VocabShard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    dims=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    written=st.lists(st.integers(0, V), max_size=3),
    read=st.lists(st.integers(0, V), max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_cache_opens_at_any_cut(tmp_path_factory, dims, written, read, dtype, data):
    """Also empty shards, uneven ones, no rows, and sequences."""
    logits = torch.randn(*dims, V, generator=torch.Generator().manual_seed(len(written)))
    folder = tmp_path_factory.mktemp("saved")
    for shard in cut([0, *sorted(written), V]):
        columns = logits[..., shard.start : shard.end]
        TeacherLogitCache.store(columns, shard, dtype).save(folder)
    start = data.draw(st.integers(0, dims[-1]))
    end = data.draw(st.integers(start, dims[-1]))
    for shard in cut([0, *sorted(read), V]):
        cache = TeacherLogitCache.open(folder, shard)
        kept = logits[..., shard.start : shard.end].to(dtype)
        assert (cache.shape, cache.dtype, cache.shard) == (kept.shape, dtype, shard)
        if data.draw(st.booleans()):
            cache.prefetch(start, end)
        assert same_bits(cache.fetch(start, end, shard=shard), kept[..., start:end, :])
        assert cache.allocated_nbytes == 0


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (5, 0), (0, 7)])
def test_a_cache_without_a_shard_is_the_whole_vocabulary(tmp_path, shape):
    logits = torch.randn(shape)
    TeacherLogitCache.store(logits).save(tmp_path)
    cache = TeacherLogitCache.open(tmp_path)
    assert cache.shard is None
    assert same_bits(cache.fetch(0, len(cache)), logits.bfloat16())
    if shape[-1]:
        half = TeacherLogitCache.open(tmp_path, VocabShard(3, 7, 7))
        assert same_bits(half.fetch(0, len(cache)), logits.bfloat16()[..., 3:])
    with pytest.raises(ValueError, match=f"vocabulary of {shape[-1]} columns, got columns"):
        TeacherLogitCache.open(tmp_path, VocabShard(0, 8, 8))


def test_all_columns_are_opened_without_a_shard(tmp_path):
    save(tmp_path)
    cache = TeacherLogitCache.open(tmp_path)
    assert cache.shard == VocabShard(0, V, V)
    assert same_bits(cache.fetch(1, 5), LOGITS[1:5])


def test_rows_do_not_lie_in_one_piece_of_save(tmp_path, monkeypatch):
    monkeypatch.setattr("vocabtp.cache.teacher._SAVE_BYTES", 100)
    save(tmp_path)
    assert same_bits(TeacherLogitCache.open(tmp_path).fetch(0, 6), LOGITS)


def test_an_opened_cache_can_be_saved_and_freed(tmp_path):
    save(tmp_path / "a")
    with TeacherLogitCache.open(tmp_path / "a") as cache:
        cache.save(tmp_path / "deep" / "b", entry=0)
    for read in (lambda: cache.fetch(0, 1), lambda: cache.save(tmp_path / "c")):
        with pytest.raises(ValueError, match="the cache was freed"):
            read()
    assert same_bits(TeacherLogitCache.open(tmp_path / "deep" / "b").fetch(0, 6), LOGITS)


def test_a_chunk_is_not_the_file(tmp_path):
    save(tmp_path)
    TeacherLogitCache.open(tmp_path).fetch(0, 6).zero_()
    assert same_bits(TeacherLogitCache.open(tmp_path).fetch(0, 6), LOGITS)


def test_identity_is_kept_and_compared(tmp_path):
    tokens = torch.arange(4)
    save(tmp_path, teacher="big/v1", tokens=tokens)
    cache = TeacherLogitCache.open(tmp_path, teacher="big/v1", tokens=tokens)
    cache.check(teacher="big/v1", tokens=tokens)
    with pytest.raises(ValueError, match=r"entry 0 of .*teacher must be .*, big/v1, got big/v2"):
        TeacherLogitCache.open(tmp_path, teacher="big/v2")
    with pytest.raises(ValueError, match="positions must be"):
        TeacherLogitCache.open(tmp_path, positions=tokens)
    with pytest.raises(ValueError, match="teacher must be"):
        list(TeacherLogitStream(tmp_path, teacher="big/v2"))


def test_nothing_is_overwritten(tmp_path):
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for bounds in ((0, 4, V), (0, 2, V), (0, V)):
        with pytest.raises(ValueError, match=r"entry 0 has columns .*entry-00000-columns-0-4"):
            save(tmp_path, bounds, LOGITS + 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_entries_are_ints(tmp_path):
    cache = TeacherLogitCache.store(LOGITS)
    for call in (cache.save, TeacherLogitCache.open):
        with pytest.raises(ValueError, match="entry must be at least 0, got -1"):
            call(tmp_path, entry=-1)
        with pytest.raises(TypeError, match="entry must be an int, got str"):
            call(tmp_path, entry="0")
    with pytest.raises(ValueError, match=r"entry 0 of .* is not there"):
        TeacherLogitCache.open(tmp_path)


def test_a_stream_gives_the_caches_in_order(tmp_path):
    for entry in (2, 0, 1):
        save(tmp_path, logits=LOGITS + entry, entry=entry)
    (tmp_path / "entry-notes.json").write_text("a stranger's file")
    stream = TeacherLogitStream(tmp_path, cut((0, 7, V))[0])
    assert len(stream) == 3
    caches = []
    for entry, cache in enumerate(stream):
        assert same_bits(cache.fetch(0, 6), (LOGITS + entry)[:, :7])
        assert all(earlier.closed for earlier in caches)
        caches.append(cache)
    assert len(caches) == 3
    assert all(cache.closed for cache in caches)
    assert same_bits(stream[2].fetch(0, 6), (LOGITS + 2)[:, :7])
    with pytest.raises(IndexError, match="below 3, got 3"):
        stream[3]


def test_a_stream_takes_a_budget(tmp_path):
    save(tmp_path)
    for cache in TeacherLogitStream(tmp_path, prefetch_bytes=50):
        assert cache.prefetch_bytes == 50
    for wrong, error in ((-1, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="TeacherLogitStream: prefetch_bytes must be"):
            TeacherLogitStream(tmp_path, prefetch_bytes=wrong)


def test_a_stream_that_is_left_frees_what_it_opened_ahead(tmp_path, monkeypatch):
    opened = []
    plain = TeacherLogitCache.open.__func__

    def watched(cls, *args, **kwargs):
        opened.append(plain(cls, *args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(TeacherLogitCache, "open", classmethod(watched))
    for entry in range(3):
        save(tmp_path, entry=entry)
    reader = iter(TeacherLogitStream(tmp_path))
    next(reader)
    reader.close()
    assert len(opened) == 2
    assert all(cache.closed for cache in opened)


def test_a_stream_with_a_hole_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no saved cache"):
        TeacherLogitStream(tmp_path)
    with pytest.raises(ValueError, match="is no directory"):
        TeacherLogitStream(tmp_path / "nowhere")
    for entry in (0, 2):
        save(tmp_path, entry=entry)
    with pytest.raises(ValueError, match="lacks entry 1, though it holds entry 2"):
        TeacherLogitStream(tmp_path)
