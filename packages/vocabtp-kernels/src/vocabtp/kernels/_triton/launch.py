"""Where kernels run and how they are started: the only file that names a device.

Every kernel takes rows at up to two strides. A forward cuts a row into segments whose number
depends on its width alone, so that few rows fill a chip and a row's bits never depend on how many
rows there are.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vocabtp.kernels._rows import Rows

# columns that a program of the forward reads a step: four loads of a tile
TILE = 1024
STEP = 4 * TILE
# columns of a block of an element-wise kernel
BLOCK = 4096
_MOST_SEGMENTS = 8
_LEAST_STEPS = 2

INTERPRETED = triton.knobs.runtime.interpret


class Segments(NamedTuple):
    """How a row of some width is cut."""

    count: int
    cols: int  # of each but the last


def segments(cols: int) -> Segments:
    """Segments of whole steps, at most eight, of two steps at least."""
    steps = -(-cols // STEP)
    each = max(_LEAST_STEPS, -(-steps // _MOST_SEGMENTS))
    return Segments(max(1, -(-steps // each)), each * STEP)


def strides(rows: Rows) -> tuple[int, int, int]:
    """What a kernel needs to find a row: rows of the inner dimension, outer and inner stride."""
    return rows.blocks.shape[1], rows.blocks.stride(0), rows.blocks.stride(1)


def hardware_log(device: torch.device) -> bool:
    """Whether the approximate base-2 logarithm of NVIDIA's chips may be used."""
    return device.type == "cuda" and torch.version.hip is None and not INTERPRETED


def run(kernel: Any, programs: int, device: torch.device, *args: object, **options: Any) -> None:
    """Start `programs` programs of a kernel on the device that holds its tensors."""
    on_device: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device.type != "cpu":
        on_device = torch.get_device_module(device).device(device)
    with on_device:
        kernel[(programs,)](*args, **options)


def row_block(rows: int) -> int:
    """Rows that a program of a `[N]` kernel takes."""
    return 128 if rows >= 128 else triton.next_power_of_2(max(rows, 1))


def partials(out: Tensor, cut: Segments) -> Tensor:
    """Where segments put their statistics `[planes, segments, N]`; `out` itself for one segment."""
    if cut.count == 1:
        return out
    return out.new_empty(out.shape[0], cut.count, out.shape[1])
