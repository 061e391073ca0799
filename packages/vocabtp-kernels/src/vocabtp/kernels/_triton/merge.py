"""Parts of rows - segments, or ranks - put together again, and what follows, one launch each.

Few rows are bound by launches: `_stats` would take some twenty.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.merge_kernels import add_kernel, merge_kernel


def _alike(parts: ShardStats) -> ShardStats:
    """The same `[P, *, N]` with one stride between parts and one between planes."""
    maxes, sums, flags = parts
    strides = maxes.stride()
    flagged = flags.shape[1] == 0 or (flags.stride(0), flags.stride(2)) == (strides[0], 1)
    if sums.stride() == strides and strides[2] == 1 and flagged:
        return parts
    sizes = [part.shape[1] for part in parts]
    return ShardStats(*torch.split(torch.cat([*parts], dim=1), sizes, dim=1))


def merge(
    parts: ShardStats, temperature: float, *, sides: int, weighted: bool, value: bool = False
) -> tuple[ShardStats, Tensor | None]:
    """`[P, *, N]` of parts into `[*, N]` of whole rows, and the value of KL if asked for."""
    maxes, sums, flags = parts = _alike(parts)
    count, _, rows = maxes.shape
    flagged = int(sides == 2 and weighted)
    planes = 2 * sides + weighted
    out = maxes.new_empty(planes + flagged, rows)
    values = maxes.new_empty(rows) if value else None
    if rows:
        launch.run(
            merge_kernel,
            triton.cdiv(rows, launch.ROW_BLOCK),
            out.device,
            maxes,
            sums,
            flags if flagged else sums,
            out,
            out if values is None else values,
            rows,
            count,
            maxes.stride(0),
            maxes.stride(1),
            launch.LOG2E / temperature,
            1.0 / temperature,
            SIDES=sides,
            WEIGHTED=weighted,
            VALUE=value,
            BLOCK=launch.ROW_BLOCK,
            num_warps=4,
        )
    return ShardStats(out[:sides], out[sides:planes], out[planes:]), values


def whole_rows(
    parts: ShardStats, temperature: float, *, sides: int, weighted: bool, merged: bool
) -> ShardStats:
    """What a read hands on: its parts, or the one part that they are together."""
    if not merged or parts.maxes.shape[0] == 1:
        return parts
    whole, _ = merge(parts, temperature, sides=sides, weighted=weighted)
    return ShardStats(*(plane[None] for plane in whole))


def finish_kl(parts: ShardStats, temperature: float) -> tuple[Tensor, ShardStats]:
    """KL(A || B) = W / S_a + log(S_b / S_a) `[N]`, +inf outside B's support, NaN before that."""
    stats, values = merge(parts, temperature, sides=2, weighted=True, value=True)
    assert values is not None
    return values, stats


def merge_pair(parts: ShardStats, temperature: float) -> ShardStats:
    """`(m_p, m_q; S_p, S_q)` of whole rows."""
    if parts.maxes.shape[0] == 1:
        return ShardStats(*(plane[0] for plane in parts))
    return merge(parts, temperature, sides=2, weighted=False)[0]


def _add(parts: Tensor, stats: ShardStats | None, scale: float) -> tuple[Tensor, Tensor | None]:
    rows = parts.shape[2]
    if parts.stride(2) != 1:
        parts = parts.contiguous()
    out = parts.new_empty(3, rows)
    values = None if stats is None else parts.new_empty(rows)
    if rows:
        launch.run(
            add_kernel,
            triton.cdiv(rows, launch.ROW_BLOCK),
            out.device,
            parts,
            out if stats is None else stats.sums.contiguous(),
            out,
            out if values is None else values,
            rows,
            parts.shape[0],
            parts.stride(0),
            parts.stride(1),
            scale,
            VALUE=values is not None,
            BLOCK=launch.ROW_BLOCK,
            num_warps=4,
        )
    return out, values


def added(parts: Tensor, *, merged: bool) -> Tensor:
    """What a second read hands on: `[P, 3, N]` of its parts, or of the one that they are."""
    if not merged or parts.shape[0] == 1:
        return parts
    return _add(parts, None, 1.0)[0][None]


def finish_terms(parts: Tensor, stats: ShardStats, scale: float) -> tuple[Tensor, Tensor]:
    """The first of three planes times `scale` `[N]`, NaN where a side does not exist; all three."""
    terms, values = _add(parts, stats, scale)
    assert values is not None
    return values, terms
