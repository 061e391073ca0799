"""Segments of rows put together again, one launch each."""

from __future__ import annotations

import triton
from torch import Tensor

from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.online import merge_segments, sum_segments


def merge_stats(
    part: Tensor, out: Tensor, c: float, inv_t: float, *, sides: int, weighted: bool, flags: bool
) -> None:
    """Statistics `[planes, segments, N]` of each segment into those of whole rows `[planes, N]`."""
    if part is out:
        return
    rows = out.shape[1]
    block = launch.ROW_BLOCK
    launch.run(
        merge_segments,
        triton.cdiv(rows, block),
        out.device,
        part,
        out,
        rows,
        part.shape[1],
        c,
        inv_t,
        SIDES=sides,
        WEIGHTED=weighted,
        FLAGS=flags,
        BLOCK=block,
        num_warps=4,
    )


def add_segments(part: Tensor, out: Tensor) -> Tensor:
    """Sums of three planes over segments."""
    if part is not out:
        rows = out.shape[1]
        block = launch.ROW_BLOCK
        launch.run(
            sum_segments,
            triton.cdiv(rows, block),
            out.device,
            part,
            out,
            rows,
            part.shape[1],
            PLANES=3,
            BLOCK=block,
            num_warps=4,
        )
    return out
