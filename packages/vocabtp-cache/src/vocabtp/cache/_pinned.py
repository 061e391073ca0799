"""Rows in host memory, and copies between them and a tensor on whatever device.

Letters: N rows, L columns of this shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from vocabtp.cache._streams import is_accelerator, wait
from vocabtp.cache.pool import PinnedPool, Segment

# what a conversion on the source's device may take at a time
STAGE_BYTES = 32 << 20


class HostRows:
    """`[N, L]` rows in host memory, one behind the other over the pieces of a pool.

    Args:
        rows: N.
        width: L.
        dtype: Of the rows.
        pool: Who lends the memory; None is pageable memory of their own.

    Raises:
        ValueError: The pool's limit forbids it.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, pool: PinnedPool | None) -> None:
        self._pool = pool
        self._segments: list[Segment] = []
        self._uses: dict[tuple[torch.device, int], torch.Event] = {}
        self._waited: set[tuple[torch.device, int]] = set()
        self._parts: list[Tensor] = []
        self._width, self._dtype = width, dtype
        self.nbytes = rows * width * dtype.itemsize
        if pool is None:
            self._parts.append(torch.empty(rows * width, dtype=dtype, device="cpu"))
        else:
            self._segments = pool.lend(self.nbytes)
            self._parts = [pool.view(segment).view(dtype) for segment in self._segments]
            self.nbytes = sum(segment.nbytes for segment in self._segments)
        # the number that each part begins with
        self._firsts = [0, *accumulate(part.numel() for part in self._parts)][:-1]

    def _pieces(self, start: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows from `start` in host memory beside their like in `flat`, contiguous both."""
        at = start * self._width
        end = at + flat.numel()
        # the last part that begins at or before the rows do
        for i in range(max(0, bisect_right(self._firsts, at) - 1), len(self._parts)):
            part, first = self._parts[i], self._firsts[i]
            lo, hi = max(at, first), min(end, first + part.numel())
            if lo >= hi:
                return
            yield part[lo - first : hi - first], flat[lo - at : hi - at]

    def write(self, start: int, source: Tensor) -> None:
        """Copy `[n, L]` of any strides, dtype and device to the rows from `start`.

        From an accelerator the copies are queued on its current stream, behind those that had
        the memory before. They are made contiguous and converted there, `STAGE_BYTES` at a time:
        a strided copy over the bus takes ten times as long.
        """
        device = source.device
        self._wait(device)
        step = max(1, STAGE_BYTES // max(1, self._width * self._dtype.itemsize))
        try:
            for at in range(0, source.shape[0], step):
                rows = source[at : at + step].to(self._dtype).contiguous()
                for piece, values in self._pieces(start + at, rows.view(-1)):
                    piece.copy_(values, non_blocking=is_accelerator(device))
        finally:
            self._note(device)

    def read(self, start: int, out: Tensor) -> None:
        """Copy the rows from `start` to `out`, `[n, L]` contiguous, on its current stream."""
        try:
            for piece, values in self._pieces(start, out.view(-1)):
                values.copy_(piece, non_blocking=is_accelerator(out.device))
        finally:
            self._note(out.device)

    def release(self) -> None:
        """Give the memory back, with the copies that may be under way; twice is fine."""
        segments, self._segments = self._segments, []
        self._parts.clear()
        self.nbytes = 0
        if segments and self._pool is not None:
            uses = tuple(self._uses.values())
            self._pool.take_back([replace(s, pending=(*s.pending, *uses)) for s in segments])

    def __del__(self) -> None:
        self.release()

    def _wait(self, device: torch.device) -> None:
        """Let the device's current stream wait for the copies that had the memory before; once."""
        here = device, _stream_id(device)
        if here in self._waited:
            return
        for event in {id(e): e for s in self._segments for e in s.pending}.values():
            wait(event, device)
        self._waited.add(here)

    def _note(self, device: torch.device) -> None:
        """Remember that the device's current stream has copies of these rows."""
        if self._pool is None or not is_accelerator(device):
            return
        key = device, _stream_id(device)
        if key not in self._uses:
            self._uses[key] = torch.Event(device)
        self._uses[key].record(torch.accelerator.current_stream(device))


def _stream_id(device: torch.device) -> int:
    """Of the device's current stream; -1 for this thread."""
    if not is_accelerator(device):
        return -1
    return torch.accelerator.current_stream(device).stream_id
