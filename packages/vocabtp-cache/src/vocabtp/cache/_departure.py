"""The way of rows from the device that made them to host memory, beside what it does next.

Letters: B sequences, T positions, L columns of this shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from vocabtp.cache import _pinned
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import is_accelerator, mark, side_stream

# snapshots of a source that its owner may overwrite; of STAGE_BYTES each
STAGES = 8


def send(
    host: HostRows, source: Tensor, dtype: torch.dtype, *, donated: bool
) -> torch.Event | None:
    """Start to copy every row of `source` to `host`.

    On an accelerator the copies run on a side stream behind what the current stream was given so
    far. A source that is not donated is copied on the device first, on the current stream, through
    `STAGES` buffers; where it is larger than these, that stream waits for the bus.

    Args:
        host: Room for its rows.
        source: `[B, T, L]` of any strides, dtype and device.
        dtype: Of the rows in `host`.
        donated: Nobody writes to `source` any more.

    Returns:
        An event behind the last copy; None where it is complete.
    """
    device = source.device
    if not is_accelerator(device):
        for start, rows in _runs(source):
            host.write(start, rows)
        return None
    side, home = side_stream(device, "out"), torch.accelerator.current_stream(device)
    if donated:
        side.wait_stream(home)
        try:
            with side:
                for start, rows in _runs(source):
                    host.write(start, rows)
                return mark(device)
        finally:
            # the owner may drop it at once
            source.record_stream(side)
    return _send_snapshots(host, source, dtype, side, home)


def _send_snapshots(
    host: HostRows, source: Tensor, dtype: torch.dtype, side: torch.Stream, home: torch.Stream
) -> torch.Event | None:
    device, width = source.device, source.shape[-1]
    step = max(1, _pinned.STAGE_BYTES // max(1, width * dtype.itemsize))
    ring: deque[tuple[Tensor, torch.Event | None]] = deque()
    try:
        for start, rows in _runs(source):
            for at in range(0, rows.shape[0], step):
                part = rows[at : at + step]
                if len(ring) < STAGES:
                    room = torch.empty(min(step, rows.shape[0]), width, dtype=dtype, device=device)
                else:
                    room, gone = ring.popleft()
                    assert gone is not None
                    home.wait_event(gone)
                ring.append((room, None))
                snapshot = room[: part.shape[0]].copy_(part)
                side.wait_stream(home)
                with side:
                    host.write(start + at, snapshot)
                    ring[-1] = room, mark(device)
        side.wait_stream(home)
        with side:
            return mark(device)
    finally:
        for room, _ in ring:
            room.record_stream(side)


def _runs(source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`[n, L]` parts of a `[B, T, L]` source, each with its first row: one where strides allow."""
    batch, length, width = source.shape
    if source.is_contiguous():
        yield 0, source.view(batch * length, width)
        return
    for b in range(batch):
        yield b * length, source[b]
