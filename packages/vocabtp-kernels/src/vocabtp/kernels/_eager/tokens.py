"""Log-probabilities and entropy of one distribution: p = exp(u) / S, u = (x - m) / T.

S = sum exp(u), W = sum exp(u) u. With the saved ratio W / S, log p + H is u - W / S exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels import _stats
from vocabtp.kernels._eager import tiles
from vocabtp.kernels._ids import Bounds, Watch
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF, NAN, ShardStats, TokenShard, TokenValues


def token_stats(
    logits: Rows,
    ids: Rows,
    bounds: Bounds,
    dtype: torch.dtype,
    temperature: float,
    *,
    entropy: bool,
    merged: bool,
    watch: Watch | None,
) -> TokenShard:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `ids`, 0 where they are not here."""
    rows, number = logits.num_rows, ids.num_cols
    codes = _codes(ids, bounds, dtype)
    if watch is not None:
        watch.known(codes)
    maxes = torch.empty(1, rows, dtype=dtype, device=logits.device)
    sums = torch.empty(2 if entropy else 1, rows, dtype=dtype, device=logits.device)
    chosen = torch.zeros(rows, number, dtype=dtype, device=logits.device)
    width = logits.num_cols
    for here, work in tiles.working(logits, dtype, sums.shape[0], 0.5, ids=number):
        exps, u = work[0], logits.copy_to(work[-1], here.start)
        if width and number:
            at = _columns(ids.copy(here, torch.int64), bounds, width)
            chosen[here] = torch.where(at >= 0, u.gather(1, at.clamp(min=0)), 0.0)
        maxes[0, here] = tiles.row_max(u)
        tiles.centre_(u, maxes[0, here], temperature)
        torch.exp(u, out=exps)
        if entropy:
            # 0 * -inf at a masked token adds nothing
            u.masked_fill_(u == -INF, 0.0).mul_(exps)
        sums[:, here] = tiles.row_sum(work)
    return TokenShard(ShardStats(maxes[None], sums[None], codes[None]), chosen)


def _codes(ids: Rows, bounds: Bounds, dtype: torch.dtype) -> Tensor:
    """`[1, N]`, or `[0, N]` without ids: 0, or a row's first bad id, plus 1 if not negative."""
    number = ids.num_cols
    codes = torch.zeros(min(number, 1), ids.num_rows, dtype=dtype, device=ids.device)
    if number == 0:
        return codes
    for here in tiles.chunks(ids, torch.int64, buffers=0, ids=number):
        some = ids.copy(here, torch.int64)
        bad = (some != bounds.ignore_index) & ((some < 0) | (some >= bounds.vocab_size))
        first = bad.to(torch.int8).argmax(1, keepdim=True)
        code = some.gather(1, first)
        code = torch.where(code >= 0, code + 1, code) * bad.gather(1, first)
        codes[0, here] = code[:, 0].to(dtype)
    return codes


def _columns(ids: Tensor, bounds: Bounds, width: int) -> Tensor:
    """The columns of ids `[n, K]`, -1 for what is no column of this shard."""
    columns = ids - bounds.vocab_start
    nowhere = (ids == bounds.ignore_index) | (columns < 0) | (columns >= width)
    return columns.masked_fill_(nowhere, -1)


def finish_tokens(
    stats: ShardStats,
    chosen: Tensor,
    ids: Rows,
    bounds: Bounds,
    temperature: float,
    *,
    entropy: bool,
    watch: Watch | None,
) -> TokenValues:
    """Merge `[P, *, N]` and finish; log-probabilities are written where `chosen` is."""
    if watch is not None:
        watch.known(stats.flags[:, 0])
    if stats.maxes.shape[0] == 1:
        whole = ShardStats(stats.maxes[0], stats.sums[0], stats.flags.abs().amax(0))
    else:
        whole = _stats.merge_softmax(stats, temperature)
    bad = (whole.flags != 0).any(0)
    for here in tiles.chunks(ids, torch.int64, buffers=0, ids=ids.num_cols):
        ignored = ids.copy(here, torch.int64) == bounds.ignore_index
        part = chosen[here]
        values = _stats.finish_logprobs(whole.rows(here), part, temperature)
        values.masked_fill_(bad[here, None], NAN).masked_fill_(ignored, 0.0)
        part.copy_(values)
    entropies = _stats.finish_entropy(whole) if entropy else None
    planes = (whole.maxes, whole.sums[:1], bad[None].to(chosen.dtype), whole.sums[1:])
    return TokenValues(chosen, entropies, torch.cat(planes))


def token_grad(
    logits: Rows,
    stats: Tensor,
    ids: Rows,
    bounds: Bounds,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    temperature: float,
) -> None:
    """One read, one write: `sum_k w_k (onehot_k - p) - w_h p (log p + H)` into `out` `[N, L]`.

    A weight counts whether or not its column is here.
    """
    if logits.num_cols == 0:
        return
    for here, (u, grad) in tiles.working(logits, stats.dtype, 2, 0.5, ids=ids.num_cols):
        m, s, bad, *weighted = stats[:, here]
        skip = torch.ones_like(m, dtype=torch.bool)
        weights, total = None, torch.zeros_like(m)
        if grad_logprobs is not None:
            some = ids.copy(here, torch.int64)
            columns = _columns(some, bounds, logits.num_cols)
            upstream = torch.where(some != bounds.ignore_index, grad_logprobs[here], 0.0)
            skip = (upstream == 0).all(1)
            nan = (upstream != 0) & (bad != 0)[:, None]
            weights = (upstream / temperature).masked_fill_(nan, NAN)
            total = tiles.row_sum(weights.clone())
        tiles.centre_(logits.copy_to(u, here.start), m, temperature)
        torch.exp(u, out=grad).div_(-s[:, None])
        if grad_entropy is None:
            grad.mul_(total[:, None])
        else:
            upstream = grad_entropy[here]
            skip &= upstream == 0
            # where p is 0 u must not be -inf, nor become it
            u.masked_fill_(grad == 0, 0.0).sub_((weighted[0] / s)[:, None])
            u.mul_((upstream / temperature)[:, None]).add_(total[:, None])
            grad.mul_(u)
        if weights is not None:
            _add_chosen(grad, columns, weights)
        grad.masked_fill_((skip | (s == 0))[:, None], 0.0)
        out[here] = grad


def _add_chosen(grad: Tensor, columns: Tensor, weights: Tensor) -> None:
    """Add the weights of ids at their columns, those of one column together and in one order."""
    at = columns.clamp(min=0)
    # ids of no column come with the first one's, to which they add nothing: ids of one place have
    # to write the same
    weights = _together(at, torch.where(columns >= 0, weights, 0.0))
    grad.scatter_(1, at, grad.gather(1, at) + weights)


def _together(columns: Tensor, weights: Tensor) -> Tensor:
    """What all of a row's ids of the same column weigh, for each id `[n, K]`."""
    rows, number = columns.shape
    if number < 2:
        return weights
    total = torch.zeros_like(weights)
    for first in range(0, number, tiles.ALIKE):
        some = slice(first, first + tiles.ALIKE)
        alike = columns[:, :, None] == columns[:, None, some]
        part = torch.where(alike, weights[:, None, some], 0.0)
        total += tiles.row_sum(part.view(rows * number, -1)).view(rows, number)
    return total
