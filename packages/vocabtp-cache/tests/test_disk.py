"""Caches on disk: what was saved comes back, and what is not whole is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import TeacherLogitCache, TeacherLogitStream
from vocabtp.dist import VocabShard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
V = 11
LOGITS = torch.randn(6, V, generator=torch.Generator().manual_seed(0))


def same_bits(a, b):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def cut(bounds):
    """Shards between these columns."""
    return [VocabShard(a, b, V) for a, b in pairwise(bounds)]


def save(directory, bounds=(0, 4, V), logits=LOGITS, entry=0, **identity):
    for shard in cut(bounds):
        columns = logits[..., shard.start : shard.end]
        with TeacherLogitCache.store(columns, shard, torch.float32, **identity) as cache:
            cache.save(directory, entry=entry)


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


def test_an_entry_without_all_ranks_is_refused(tmp_path):
    for shard in cut((0, 4, 8, V))[::2]:
        TeacherLogitCache.store(LOGITS[:, shard.start : shard.end], shard).save(tmp_path)
    for shard in cut((0, 4, V)):
        with pytest.raises(ValueError, match=r"entry 0 of .*incomplete: .*\[0, 4\), \[8, 11\)"):
            TeacherLogitCache.open(tmp_path, shard)


@pytest.mark.parametrize(
    "other",
    [
        {"logits": LOGITS[:5]},
        {"logits": LOGITS.view(2, 3, V)},
        {"logits": LOGITS, "teacher": "another"},
    ],
)
def test_ranks_that_saved_different_things_are_refused(tmp_path, other):
    save(tmp_path / "a")
    save(tmp_path / "b", **other)
    for path in (tmp_path / "b").glob("*columns-4-*"):
        path.replace(tmp_path / "a" / path.name)
    with pytest.raises(ValueError, match=r"entry 0 of .* is a mixture: .*columns-4-11.*0-4"):
        TeacherLogitCache.open(tmp_path / "a")


FILES = [
    f"entry-00000-columns-{a}.{kind}" for a in ("0-4", "4-11") for kind in ("json", "safetensors")
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["truncated", "longer", "empty", "first", "middle", "last"])
def test_a_harmed_file_is_refused_by_name(tmp_path, name, harm):
    save(tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if harm == "truncated":
        del data[-3:]
    elif harm == "longer":
        data += b"xyz"
    elif harm == "empty":
        data.clear()
    else:
        at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 4}[harm]
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=name):
        TeacherLogitCache.open(tmp_path)


def test_every_byte_of_an_index_counts(tmp_path):
    """A changed byte is refused, or says the same in other blanks."""
    save(tmp_path, (0, V))
    path = tmp_path / f"entry-00000-columns-0-{V}.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=path.name):
            TeacherLogitCache.open(tmp_path)


def test_without_verify_sizes_headers_and_presence_are_checked(tmp_path):
    save(tmp_path)
    data = tmp_path / f"entry-00000-columns-4-{V}.safetensors"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    changed = TeacherLogitCache.open(tmp_path, verify=False).fetch(0, 6)
    assert not same_bits(changed, LOGITS)
    data.write_bytes(whole[:10] + b"?" + whole[11:])
    with pytest.raises(ValueError, match=f"{data.name} was altered: its header"):
        TeacherLogitCache.open(tmp_path, verify=False)
    data.unlink()
    for shard in cut((0, 4, V)):  # also the rank that does not read it
        with pytest.raises(ValueError, match=f"{data.name} is missing"):
            TeacherLogitCache.open(tmp_path, shard, verify=False)


def test_another_version_is_refused(tmp_path):
    save(tmp_path, (0, V))
    path = next(tmp_path.glob("*.json"))
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "version": 2}))
    with pytest.raises(ValueError, match=rf"{path.name} is of format .*2\), this version reads"):
        TeacherLogitCache.open(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=f"{path.name} was truncated or altered"):
        TeacherLogitCache.open(tmp_path)


def test_a_renamed_index_is_refused(tmp_path):
    save(tmp_path, (0, V))
    path = next(tmp_path.glob("*.json"))
    path.replace(tmp_path / path.name.replace("entry-00000", "entry-00001"))
    with pytest.raises(ValueError, match=r"entry-00001-columns-0-11\.json was renamed"):
        TeacherLogitCache.open(tmp_path, entry=1)


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


KILLED = """
    import os, shutil, signal, sys, torch
    from vocabtp.cache import TeacherLogitCache, _files, teacher
    from vocabtp.dist import VocabShard

    torch.set_num_threads(1)
    teacher._SAVE_BYTES = 90
    before, root = sys.argv[1:]

    class Halves:
        # a file of which every write can be cut in two

        def __init__(self, path, mode):
            self.file = open(path, mode)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            half = len(data) // 2
            self.file.write(data[:half])
            self.file.flush()
            self.cut()
            self.file.write(data[half:])

        def cut(self):
            pass

        def __getattr__(self, name):
            return getattr(self.file, name)

    def killed_at(point):
        seen = 0
        def counted(call):
            def wrapper(*args, **kwargs):
                nonlocal seen
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return wrapper
        # inside each write, before and after what makes them last and names them
        Halves.cut = counted(Halves.cut)
        _files.open = Halves
        for name in ("fsync", "replace", "close"):
            setattr(os, name, counted(getattr(os, name)))
        logits = torch.arange(66.0).view(6, 11) + 1
        part = logits[:, 4:].clone()
        cache = TeacherLogitCache.store(part, VocabShard(4, 11, 11), torch.float32)
        cache.save(f"{root}/{point}", entry=1)
        os._exit(7)

    for point in range(1, 100):
        shutil.copytree(before, f"{root}/{point}")
        child = os.fork()
        if not child:
            killed_at(point)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 7
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(point)
"""


def test_a_save_that_is_killed_leaves_nothing_half(tmp_path):
    """Entry 1 is being saved by its second rank, which dies at every point of it in turn."""
    before, root = tmp_path / "before", tmp_path / "killed"
    later = torch.arange(66.0).view(6, V) + 1
    save(before)
    first, second = cut((0, 4, V))
    TeacherLogitCache.store(later[:, :4], first, torch.float32).save(before, entry=1)
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(before), str(root)]
    points = int(subprocess.run(script, check=True, capture_output=True, timeout=120).stdout)
    assert points > 11
    complete = 0
    for point in range(1, points + 1):
        folder = root / str(point)
        assert same_bits(TeacherLogitCache.open(folder).fetch(0, 6), LOGITS)
        try:
            cache = TeacherLogitCache.open(folder, entry=1)
        except ValueError as error:
            assert f"entry 1 of {folder} is incomplete" in str(error)  # noqa: PT017
            # the rank comes back and saves again
            part = TeacherLogitCache.store(later[:, 4:], second, torch.float32)
            part.save(folder, entry=1)
            cache = TeacherLogitCache.open(folder, entry=1)
        else:
            complete += 1
        assert same_bits(cache.fetch(0, 6), later)
    # the index is there, its folder's name not yet on the disk; and the one that was not killed
    assert 1 <= complete <= 5


def test_a_save_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path)
    assert list(tmp_path.iterdir()) == []
