"""Log-probabilities and entropy of one distribution: p = exp(u) / S, u = (x - m) / T.

S = sum exp(u), W = sum exp(u) u. With the saved ratio W / S, log p + H is u - W / S exactly. On the
device exp(u) is exp2((x - m) c) with c = log2(e) / T.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.merge import merge_stats
from vocabtp.kernels._triton.tokens_kernels import (
    chosen_grad_kernel,
    chosen_kernel,
    token_grad_kernel,
    token_stats_kernel,
    total_kernel,
)

_LOG2E = 1.4426950408889634


def token_stats(
    logits: Rows, columns: Tensor, dtype: torch.dtype, temperature: float, *, entropy: bool
) -> tuple[ShardStats, Tensor]:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `columns` `[N, K]`, 0 where < 0."""
    rows, cols, device = logits.num_rows, logits.num_cols, logits.device
    out = torch.empty(3 if entropy else 2, rows, dtype=dtype, device=device)
    stats = ShardStats(out[:1], out[1:], out[:0])
    if rows == 0 or cols == 0:
        out[:1].fill_(-float("inf"))
        out[1:].fill_(0.0)
        return stats, torch.zeros(columns.shape, dtype=dtype, device=device)
    cut = launch.segments(cols)
    part = launch.partials(out, cut)
    c, inv_t = _LOG2E / temperature, 1.0 / temperature
    launch.run(
        token_stats_kernel,
        rows * cut.number,
        device,
        logits.blocks,
        part,
        rows,
        cols,
        *cut,
        *launch.strides(logits),
        c,
        inv_t,
        ENTROPY=entropy,
        TILE=launch.TILE,
        **launch.READ,
    )
    merge_stats(part, out, c, inv_t, sides=1, weighted=entropy, flags=False)
    chosen = torch.empty(columns.shape, dtype=dtype, device=device)
    ids = columns.shape[1]
    if ids:
        launch.run(
            chosen_kernel,
            rows,
            device,
            logits.blocks,
            columns.contiguous(),
            chosen,
            ids,
            *launch.strides(logits),
            BLOCK=min(256, triton.next_power_of_2(ids)),
            num_warps=1,
        )
    return stats, chosen


def _total(weights: Tensor, rows: int) -> Tensor:
    ids = weights.shape[1]
    if ids == 1:
        return weights
    total = weights.new_empty(rows)
    block = launch.row_block(rows)
    programs = triton.cdiv(rows, block)
    launch.run(
        total_kernel, programs, weights.device, weights, total, rows, ids, BLOCK=block, num_warps=4
    )
    return total


def token_grad(
    logits: Rows,
    stats: ShardStats,
    columns: Tensor,
    weights: Tensor,
    entropy_weight: Tensor | None,
    skip: Tensor,
    out: Tensor,
    temperature: float,
) -> None:
    """One read, one write: `sum_k w_k (onehot_k - p) - w_h p (log p + H)` into `out` `[N, L]`."""
    rows, cols, device, ids = logits.num_rows, logits.num_cols, logits.device, columns.shape[1]
    if rows == 0 or cols == 0:
        return
    columns, weights = columns.contiguous(), weights.contiguous()
    total = _total(weights, rows)
    blocks = triton.cdiv(cols, launch.BLOCK)
    shared = (
        logits.blocks,
        out,
        stats.maxes,
        stats.sums,
        skip,
        columns,
        weights,
        total,
        total if entropy_weight is None else entropy_weight.contiguous(),
        rows,
        cols,
    )
    scales = (*launch.strides(logits), _LOG2E / temperature, 1.0 / temperature)
    launch.run(
        token_grad_kernel,
        rows * blocks,
        device,
        *shared,
        blocks,
        ids,
        *scales,
        ENTROPY=entropy_weight is not None,
        ONE_ID=ids == 1,
        BLOCK=launch.BLOCK,
        **launch.WRITE,
    )
    if ids > 1:
        launch.run(
            chosen_grad_kernel,
            rows,
            device,
            *shared,
            ids,
            *scales,
            ENTROPY=entropy_weight is not None,
            BLOCK=min(256, triton.next_power_of_2(ids)),
            num_warps=4,
        )
