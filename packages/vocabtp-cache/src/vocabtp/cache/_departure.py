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


# rows up to this one are on the host behind this event; in the order of the rows
Landing = tuple[int, torch.Event]


def send(host: HostRows, source: Tensor, dtype: torch.dtype, *, donated: bool) -> list[Landing]:
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
        What is behind the copies, `STAGE_BYTES` of rows each, so that the first may be on their
        way back before the last have left; nothing where they are complete.
    """
    device = source.device
    if not is_accelerator(device):
        for start, rows in _runs(source):
            host.write(start, rows)
        return []
    side, home = side_stream(device, "out"), torch.accelerator.current_stream(device)
    step = max(1, _pinned.STAGE_BYTES // max(1, source.shape[-1] * dtype.itemsize))
    if not donated:
        return _send_snapshots(host, source, dtype, (side, home), step)
    landings: list[Landing] = []
    side.wait_stream(home)
    try:
        with side:
            for start, rows in _runs(source):
                for at in range(0, rows.shape[0], step):
                    part = rows[at : at + step]
                    host.write(start + at, part)
                    landings.append((start + at + part.shape[0], mark(device)))
    finally:
        # the owner may drop it at once
        source.record_stream(side)
    return landings


def _send_snapshots(
    host: HostRows,
    source: Tensor,
    dtype: torch.dtype,
    streams: tuple[torch.Stream, torch.Stream],
    step: int,
) -> list[Landing]:
    device, width = source.device, source.shape[-1]
    side, home = streams
    landings: list[Landing] = []
    ring: deque[Tensor] = deque()
    try:
        for start, rows in _runs(source):
            for at in range(0, rows.shape[0], step):
                part = rows[at : at + step]
                if len(ring) < STAGES:
                    room = torch.empty(min(step, rows.shape[0]), width, dtype=dtype, device=device)
                else:
                    room = ring.popleft()
                    home.wait_event(landings[-STAGES][1])
                ring.append(room)
                snapshot = room[: part.shape[0]].copy_(part)
                side.wait_stream(home)
                with side:
                    host.write(start + at, snapshot)
                    landings.append((start + at + part.shape[0], mark(device)))
    finally:
        for room in ring:
            room.record_stream(side)
    return landings


def _runs(source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`[n, L]` parts of a `[B, T, L]` source, each with its first row: one where strides allow."""
    batch, length, width = source.shape
    if source.is_contiguous():
        yield 0, source.view(batch * length, width)
        return
    for b in range(batch):
        yield b * length, source[b]
