"""What several of these tests use."""

from __future__ import annotations

import collections

import pytest
import torch

from vocabtp.cache import PinnedPool
from vocabtp.cache._streams import _side_stream


@pytest.fixture
def poisoned(monkeypatch):
    """Fill what a pool takes back with NaN, behind its copies: a late reader is seen."""
    plain = PinnedPool.take_back

    def take_back(pool, segments):
        segments = list(segments)
        for segment in segments:
            for event in segment.pending:
                event.synchronize()
            pool.view(segment).fill_(255)
        plain(pool, segments)

    monkeypatch.setattr(PinnedPool, "take_back", take_back)


class Late:
    """An accelerator in name, on the CPU, whose side streams work as late as they may.

    What the current stream is given at the start is done at once. A copy on any other stream is
    done when somebody waits for an event behind it, and not before: a missing wait is seen as
    wrong numbers, in every run.
    """

    def __init__(self, monkeypatch):
        late, plain = self, torch.Tensor.copy_

        class Event:
            def __init__(self, device):
                self.stream, self.at = None, 0

            def record(self, stream):
                self.stream, self.at = stream, stream.given

            def query(self):
                return self.stream is None or self.stream.done >= self.at

            def synchronize(self):
                if self.stream is not None:
                    self.stream.work(self.at)

        class Stream:
            device_index, device_type = 0, 1

            def __init__(self, device=None, *of_device):
                if of_device:
                    # another object for the stream of this number
                    self.__dict__ = late.streams[device].__dict__
                    return
                self.queue, self.given, self.done = collections.deque(), 0, 0
                self.stream_id = len(late.streams)
                late.streams.append(self)

            def __eq__(self, other):
                return self.stream_id == other.stream_id

            def __hash__(self):
                return self.stream_id

            def give(self, job):
                self.queue.append(job)
                self.given += 1
                if self is late.home:
                    self.work(self.given)

            def work(self, until):
                while self.done < until:
                    self.done += 1
                    self.queue.popleft()()

            def wait_event(self, event):
                # what was recorded by now, whatever the event is recorded for later
                stream, at = event.stream, event.at
                if stream is not None:
                    self.give(lambda: stream.work(at))

            def wait_stream(self, other):
                event = Event(None)
                event.record(other)
                self.wait_event(event)

            def __enter__(self):
                self.before, late.current = late.current, self

            def __exit__(self, *error):
                late.current = self.before

        def copy(target, source, non_blocking=False):
            late.current.give(lambda: plain(target, source))
            return target

        self.streams, self.home, self.recorded = [], None, []
        self.home = self.current = Stream()
        self.Stream = Stream
        for module in ("_streams", "_pinned", "_departure", "_ahead", "_entries"):
            name = f"vocabtp.cache.{module}.is_accelerator"
            monkeypatch.setattr(name, lambda device: True)
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, s: self.recorded.append((tensor, s))
        )


@pytest.fixture
def late(monkeypatch):
    """Side streams that work as late as they may; see `Late`."""
    _side_stream.cache_clear()
    yield Late(monkeypatch)
    _side_stream.cache_clear()
