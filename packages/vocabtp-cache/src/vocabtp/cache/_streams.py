"""Devices, streams and events, through `torch.accelerator` alone.

Two side streams a device serve every cache of the process: one for copies to the host and one for
copies from it, so that both directions of the bus run at once.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether copies to this device are queued on a stream."""
    return device.type != "cpu"


def resolve(device: torch.device | str) -> torch.device:
    """The device with its index, so that "cuda" and "cuda:0" are one."""
    target = torch.device(device)
    if is_accelerator(target) and target.index is None:
        return torch.device(target.type, torch.accelerator.current_device_index())
    return torch.device("cpu") if target.type == "cpu" else target


@functools.cache
def _side_stream(device: torch.device, way: Literal["in", "out"]) -> torch.Stream:
    return torch.Stream(device)


def side_stream(device: torch.device, way: Literal["in", "out"]) -> torch.Stream:
    """The stream for copies to ("in") or from ("out") this device.

    An object of the caller's own for it: one that is entered remembers what was current before,
    and two threads inside of the same would go back to each other's.
    """
    kept = _side_stream(device, way)
    return torch.Stream(kept.stream_id, kept.device_index, kept.device_type)


def mark(device: torch.device) -> torch.Event:
    """An event behind all that is queued on the current stream of an accelerator."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait(event: torch.Event, device: torch.device) -> None:
    """Let the device's current stream - for the CPU this thread - wait for the event."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).wait_event(event)
    else:
        event.synchronize()


class Arrival:
    """A tensor that is being filled, on a side stream or - for the CPU - already.

    Its memory comes from the stream that was current, so that a reader which drops its chunk
    hands the memory to the next prefetch at once, in stream order: however far the host runs
    ahead, the device holds a few chunks.

    Args:
        tensor: The tensor, about to be filled.
        side: The stream that fills it; None for the CPU.
        home: The stream whose pool its memory is from.
    """

    def __init__(
        self, tensor: Tensor, side: torch.Stream | None = None, home: torch.Stream | None = None
    ) -> None:
        self._tensor: Tensor | None = tensor
        self._side, self._home = side, home
        self._filled: torch.Event | None = None
        self.nbytes = tensor.numel() * tensor.element_size()

    def filled(self) -> None:
        """All that fills it was given to the side stream, which is current."""
        assert self._tensor is not None
        self._filled = None if self._side is None else mark(self._tensor.device)

    def ended(self) -> bool:
        """Whether the copy is over, so that the memory is free as soon as it is dropped."""
        return self._side is None or (self._filled is not None and self._filled.query())

    def take(self) -> Tensor:
        """The tensor, safe to use on the current stream of its device; once."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        if self._filled is not None:
            stream = torch.accelerator.current_stream(tensor.device)
            stream.wait_event(self._filled)
            if stream != self._home:
                tensor.record_stream(stream)
        return tensor

    def __del__(self) -> None:
        # dropped before anyone waited for the copy: its memory must outlast it
        if self._tensor is not None and self._side is not None and not self.ended():
            self._tensor.record_stream(self._side)
