"""Log-probabilities and entropy of one distribution: p = exp(u) / S, u = (x - m) / T.

S = sum exp(u), W = sum exp(u) u. With the saved ratio W / S, log p + H is u - W / S exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels._eager import tiles
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF, ShardStats


def token_stats(
    logits: Rows, columns: Tensor, dtype: torch.dtype, temperature: float, *, entropy: bool
) -> tuple[ShardStats, Tensor]:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `columns` `[N, K]`, 0 where < 0."""
    rows = logits.num_rows
    maxes = torch.empty(1, rows, dtype=dtype, device=logits.device)
    sums = torch.empty(2 if entropy else 1, rows, dtype=dtype, device=logits.device)
    chosen = torch.zeros(columns.shape, dtype=dtype, device=logits.device)
    for start, stop in tiles.chunks(logits, dtype, buffers=4):
        u = logits.copy(start, stop, dtype)
        if logits.num_cols and columns.shape[1]:
            wanted = columns[start:stop]
            found = u.gather(1, wanted.clamp(min=0))
            chosen[start:stop] = torch.where(wanted >= 0, found, 0.0)
        maxes[0, start:stop] = tiles.row_max(u)
        tiles.centre_(u, maxes[0, start:stop], temperature)
        exps = u.exp()
        if entropy:
            # 0 * -inf at a masked token adds nothing
            u.masked_fill_(u == -INF, 0.0).mul_(exps)
            sums[1, start:stop] = tiles.row_sum(u)
        sums[0, start:stop] = tiles.row_sum(exps)
    return ShardStats(maxes, sums, maxes.new_zeros(0, rows)), chosen


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
    """One read, one write: `sum_k w_k (onehot_k - p) - w_h p (log p + H)` into `out` `[N, L]`.

    `weights` `[N, K]` and `entropy_weight` `[N]` hold the upstream gradients over T. A weight
    counts whether or not its column is here. Rows in `skip` `[N]` are exactly 0.
    """
    if logits.num_cols == 0:
        return
    dtype = stats.sums.dtype
    total = torch.zeros_like(stats.sums[0])
    for k in range(weights.shape[1]):
        total = total + weights[:, k]
    for start, stop in tiles.chunks(logits, dtype, buffers=4):
        here = stats.rows(start, stop)
        u = tiles.centre_(logits.copy(start, stop, dtype), here.maxes[0], temperature)
        grad = u.exp().div_(-here.sums[0, :, None])
        if entropy_weight is None:
            grad.mul_(total[start:stop, None])
        else:
            # at a masked token p is 0 and u must not be -inf
            u.masked_fill_(u == -INF, 0.0).sub_((here.sums[1] / here.sums[0])[:, None])
            u.mul_(entropy_weight[start:stop, None]).add_(total[start:stop, None])
            grad.mul_(u)
        _add_chosen(grad, columns[start:stop], weights[start:stop])
        grad.masked_fill_(skip[start:stop, None], 0.0)
        out[start:stop] = grad


def _add_chosen(grad: Tensor, columns: Tensor, weights: Tensor) -> None:
    """Add each weight at its column; one id at a time, so that duplicates have one order."""
    for k in range(columns.shape[1]):
        at = columns[:, k : k + 1].clamp(min=0)
        add = torch.where(columns[:, k : k + 1] >= 0, weights[:, k : k + 1], 0.0)
        grad.scatter_(1, at, grad.gather(1, at) + add)
