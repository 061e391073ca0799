"""Rows in host memory and their way to and from a device; device differences end here.

A caching host allocator rounds every pinned block up to a power of two, so one block of
1.2 GiB would lock 2 GiB. `plan_blocks` cuts the rows into blocks that are powers of two
already: nothing is rounded, and the allocator hands the same blocks out again in the next
step, whatever its lengths.

Letters: N rows, L columns of this shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MIN_BLOCK_BYTES = 1 << 20
MAX_BLOCK_BYTES = 64 << 20
# what a conversion on the source's device may take at a time
STAGE_BYTES = 32 << 20


class Block(NamedTuple):
    """One allocation of host memory and how many rows lie in it."""

    rows: int
    nbytes: int


def plan_blocks(rows: int, row_bytes: int) -> list[Block]:
    """Cut rows into pinned blocks whose sizes are powers of two.

    Args:
        rows: How many rows.
        row_bytes: Bytes of one row.

    Returns:
        Blocks in row order; none where there is nothing to hold. A row never straddles two
        blocks, so all but the last block waste less than one row, and the last one less than
        half of itself or `MIN_BLOCK_BYTES`.
    """
    blocks = []
    while rows and row_bytes:
        need = rows * row_bytes
        size = min(1 << (need.bit_length() - 1), MAX_BLOCK_BYTES)
        if size < max(MIN_BLOCK_BYTES, row_bytes):
            size = max(MIN_BLOCK_BYTES, 1 << (min(need, row_bytes) - 1).bit_length())
        held = min(rows, size // row_bytes)
        blocks.append(Block(held, size))
        rows -= held
    return blocks


class HostRows:
    """`[N, L]` rows in host memory, contiguous within each block.

    Args:
        rows: N.
        width: L.
        dtype: Of the rows.
        pinned: Lock the memory for the current accelerator.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.nbytes = 0
        self._parts: list[Tensor] = []
        row_bytes = width * dtype.itemsize
        blocks = plan_blocks(rows, row_bytes) if pinned else [Block(rows, rows * row_bytes)]
        for block in blocks:
            part = torch.empty(block.nbytes // dtype.itemsize, dtype=dtype, pin_memory=pinned)
            self._parts.append(part[: block.rows * width].view(block.rows, width))
            self.nbytes += block.nbytes

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The rows of [start, end) as contiguous views, each with its offset from start."""
        first = 0
        for part in self._parts:
            lo, hi = max(start, first), min(end, first + part.shape[0])
            if lo < hi:
                yield lo - start, part[lo - first : hi - first]
            first += part.shape[0]

    def write(self, start: int, source: Tensor) -> None:
        """Copy `[n, L]` of any strides, dtype and device to the rows from `start`.

        From an accelerator the copies are queued on its current stream. They are made
        contiguous and converted there, `STAGE_BYTES` at a time: a strided copy over the bus
        takes ten times as long.
        """
        on_host = source.device.type == "cpu"
        for offset, piece in self._pieces(start, start + source.shape[0]):
            rows = source[offset : offset + piece.shape[0]]
            if on_host:
                piece.copy_(rows)
                continue
            step = max(1, STAGE_BYTES // (piece.shape[1] * piece.element_size()))
            for at in range(0, piece.shape[0], step):
                stage = rows[at : at + step].to(piece.dtype).contiguous()
                piece[at : at + step].copy_(stage, non_blocking=True)

    def read(self, start: int, out: Tensor) -> None:
        """Copy the rows from `start` to `out`, `[n, L]` contiguous, on its current stream."""
        for offset, piece in self._pieces(start, start + out.shape[0]):
            target = out[offset : offset + piece.shape[0]]
            target.copy_(piece, non_blocking=out.device.type != "cpu")

    def release(self) -> None:
        """Give the memory back."""
        self._parts.clear()
        self.nbytes = 0


class Arrival:
    """A tensor that is being filled, on a side stream or - for the CPU - already.

    Its memory comes from the stream that was current, so that a reader which drops its chunk
    hands the memory to the next prefetch at once, in stream order: however far the host runs
    ahead, the device holds a few chunks.

    Args:
        tensor: The tensor.
        side: The stream that fills it, and current now; None for the CPU.
        home: The stream whose pool its memory is from.
    """

    def __init__(
        self, tensor: Tensor, side: torch.Stream | None = None, home: torch.Stream | None = None
    ) -> None:
        self._tensor: Tensor | None = tensor
        self._side, self._home = side, home
        self._filled = None if side is None else mark(tensor.device)

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
        if self._tensor is not None and self._side is not None:
            self._tensor.record_stream(self._side)


def is_accelerator(device: torch.device) -> bool:
    """Whether copies to this device are queued on a stream."""
    return device.type != "cpu"


def resolve(device: torch.device | str) -> torch.device:
    """The device with its index, so that "cuda" and "cuda:0" are one."""
    target = torch.device(device)
    if is_accelerator(target) and target.index is None:
        return torch.device(target.type, torch.accelerator.current_device_index())
    return torch.device("cpu") if target.type == "cpu" else target


def mark(device: torch.device) -> torch.Event | None:
    """An event behind all that is queued on the device's current stream."""
    if not is_accelerator(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait(event: torch.Event | None, device: torch.device) -> None:
    """Let the device's current stream - for the CPU this thread - wait for the event."""
    if event is None:
        return
    if is_accelerator(device):
        torch.accelerator.current_stream(device).wait_event(event)
    else:
        event.synchronize()
