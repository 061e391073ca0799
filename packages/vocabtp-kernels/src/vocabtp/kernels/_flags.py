"""Flags that a device raises in the host's memory, so that nobody has to ask it.

A flag is one number in a table of pinned memory. CUDA and ROCm map that memory into the device: a
kernel stores to it in the rare call that has something to say, and every other call costs nothing.
Elsewhere the number is copied after it is known.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# the numbers are 16 bytes apart: a kernel that takes one is compiled once for all of them
_SPACING = 4
_TABLE = 1024
# how many a capture finds, at least, after any call that was not captured
_RESERVE = 256


class Flag:
    """One number of a table, and the event after which it holds what a call has to say."""

    def __init__(self, cell: Tensor, device: torch.device) -> None:
        self.cell = cell  # int32 [1], pinned
        self.device = device
        self.mapped = device.type == "cuda"  # ROCm's name too
        self._event = torch.Event(device=device)

    def settled(self) -> None:
        """Everything that decides the flag is on the current stream."""
        self._event.record(torch.accelerator.current_stream(self.device))

    def wait(self) -> None:
        """Until it is decided."""
        self._event.synchronize()

    def lower(self) -> bool:
        """Whether it is up; it is down afterwards."""
        up = bool(self.cell.item())
        if up:
            self.cell.zero_()
        return up


_lock = threading.Lock()
_free: dict[torch.device, list[Flag]] = {}


def raised_by(device: torch.device) -> bool:
    """Whether the device is another one than the host, which knows everything at once."""
    return device.type != "cpu"


def take(device: torch.device) -> Flag | None:
    """A flag that is down; None on the CPU, or if a capture finds none left."""
    if not raised_by(device):
        return None
    with _lock:
        free = _free.setdefault(device, [])
        if len(free) < _RESERVE and not capturing(device):
            free.extend(Flag(cell, device) for cell in _table())
        return free.pop() if free else None


def _table() -> Tensor:
    # written in and out of inference mode, whatever the mode of the first call
    with torch.inference_mode(False):
        table = torch.zeros(_TABLE, _SPACING, dtype=torch.int32, device="cpu", pin_memory=True)
        return table[:, :1]


def give(flag: Flag) -> None:
    """Take a flag that is down back."""
    with _lock:
        _free[flag.device].append(flag)


def capturing(device: torch.device) -> bool:
    """Whether what the current stream is given is recorded in a graph, not run."""
    module = torch.get_device_module(device)
    ask = getattr(module, "is_current_stream_capturing", None)
    if ask is None:
        return False
    with module.device(device):
        return bool(ask())
