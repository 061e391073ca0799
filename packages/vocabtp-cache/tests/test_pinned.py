"""Rows over the pieces of a pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.cache import PinnedPool, TeacherLogitCache
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


class Device:
    """An accelerator in name: tells what its streams were given, in order."""

    def __init__(self, monkeypatch):
        self.log = []
        self.stream_id = 1
        device = self

        class Event:
            def __init__(self, where):
                assert where == torch.device("cpu")

            def record(self, stream):
                device.log.append(("record", stream.stream_id, self))

            def query(self):
                return False

        plain = torch.Tensor.copy_

        def copy(target, source, non_blocking=False):
            assert non_blocking
            device.log.append(("copy", device.stream_id, None))
            return plain(target, source)

        monkeypatch.setattr("vocabtp.cache._pinned.is_accelerator", lambda device: True)
        monkeypatch.setattr("vocabtp.cache.teacher.is_accelerator", lambda device: False)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda where: self)
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)

    def wait_event(self, event):
        self.log.append(("wait", self.stream_id, event))


def test_the_next_cache_waits_for_every_stream_that_used_the_memory(monkeypatch):
    device, pool = Device(monkeypatch), PinnedPool()
    cache = TeacherLogitCache.store(torch.zeros(40, 64), pool=pool)
    for device.stream_id in (2, 3, 2):
        cache.fetch(0, 40)
    events = set(cache._host._uses.values())
    assert len(events) == 3
    for stream in (1, 2, 3):
        kinds = [
            kind
            for kind, where, event in device.log
            if where == stream and (kind == "copy" or event in events)
        ]
        assert kinds[-2:] == ["copy", "record"]
    cache.free()
    device.log.clear()
    device.stream_id = 4
    TeacherLogitCache.store(torch.zeros(40, 64), pool=pool)
    before = device.log[: [kind for kind, _, _ in device.log].index("copy")]
    assert {event for kind, stream, event in before if (kind, stream) == ("wait", 4)} == events
