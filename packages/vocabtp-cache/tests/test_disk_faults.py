"""Saves that did not end and files that were harmed: what is not whole is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from saved_caches import LOGITS, V, cut, same_bits, save
from vocabtp.cache import TeacherLogitCache


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
