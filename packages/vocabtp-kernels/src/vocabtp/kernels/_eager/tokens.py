"""Log-probabilities and entropy of one distribution: p = exp(u) / S, u = (x - m) / T.

S = sum exp(u), W = sum exp(u) u. With the saved ratio W / S, log p + H is u - W / S exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels import _stats
from vocabtp.kernels._eager import tiles
from vocabtp.kernels._ids import BAD, ELSEWHERE, IGNORED, Bounds, Watch
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF, NAN, ShardStats, TokenShard, TokenValues


def resolve(ids: Tensor, bounds: Bounds, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns `[N, K]` of ids, and the code of a row's first bad id.

    The code, `[1, N]` or `[0, N]` without ids, is 0 or that id, plus 1 if it is not negative.
    """
    ids = ids.to(torch.int64)
    ignored = ids == bounds.ignore_index
    bad = ~ignored & ((ids < 0) | (ids >= bounds.vocab_size))
    local = ids - bounds.vocab_start
    columns = torch.where((local >= 0) & (local < width), local, ELSEWHERE)
    columns = columns.masked_fill(ignored, IGNORED).masked_fill(bad, BAD).to(torch.int32)
    if ids.shape[1] == 0:
        return columns, torch.empty(0, ids.shape[0], dtype=dtype, device=ids.device)
    first = bad.to(torch.int8).argmax(1, keepdim=True)
    code = ids.gather(1, first)
    code = torch.where(code >= 0, code + 1, code) * bad.gather(1, first)
    return columns, code.t().to(dtype)


def token_stats(
    logits: Rows,
    ids: Tensor,
    bounds: Bounds,
    dtype: torch.dtype,
    temperature: float,
    *,
    entropy: bool,
    merged: bool,
    watch: Watch | None,
) -> TokenShard:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `ids` `[N, K]`, 0 where not here."""
    rows = logits.num_rows
    columns, codes = resolve(ids, bounds, logits.num_cols, dtype)
    if watch is not None:
        watch.known(codes)
    maxes = torch.empty(1, rows, dtype=dtype, device=logits.device)
    sums = torch.empty(2 if entropy else 1, rows, dtype=dtype, device=logits.device)
    chosen = torch.zeros(columns.shape, dtype=dtype, device=logits.device)
    for start, stop in tiles.chunks(logits, dtype, buffers=4):
        u = logits.copy(start, stop, dtype)
        if logits.num_cols and columns.shape[1]:
            wanted = columns[start:stop].to(torch.int64)
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
    return TokenShard(ShardStats(maxes[None], sums[None], codes[None]), columns, chosen)


def finish_tokens(
    stats: ShardStats,
    chosen: Tensor,
    columns: Tensor,
    temperature: float,
    *,
    entropy: bool,
    watch: Watch | None,
) -> TokenValues:
    """Merge `[P, *, N]` and finish; `columns` of rows with a bad id anywhere become BAD."""
    if watch is not None:
        watch.known(stats.flags[:, 0])
    if stats.maxes.shape[0] == 1:
        whole = ShardStats(stats.maxes[0], stats.sums[0], stats.flags.abs().amax(0))
    else:
        whole = _stats.merge_softmax(stats, temperature)
    if columns.shape[1]:
        anywhere = (whole.flags[0] != 0)[:, None] & (columns != IGNORED)
        columns.masked_fill_(anywhere, BAD)
    values = _stats.finish_logprobs(whole, chosen, temperature)
    values = values.masked_fill(columns == BAD, NAN).masked_fill(columns == IGNORED, 0.0)
    entropies = _stats.finish_entropy(whole) if entropy else None
    return TokenValues(values, entropies, torch.cat((whole.maxes, whole.sums)))


def token_grad(
    logits: Rows,
    stats: Tensor,
    columns: Tensor,
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
    total = torch.zeros_like(stats[1])
    skip = torch.ones_like(stats[1], dtype=torch.bool)
    columns = columns[:, : 0 if grad_logprobs is None else None]
    weights = stats.new_empty(columns.shape)
    if grad_logprobs is not None:
        weights, skip = _weights(grad_logprobs, columns, temperature)
        for k in range(weights.shape[1]):
            total = total + weights[:, k]
    entropy_weight = None
    if grad_entropy is not None:
        entropy_weight = grad_entropy / temperature
        skip &= grad_entropy == 0
    skip |= stats[1] == 0
    for start, stop in tiles.chunks(logits, stats.dtype, buffers=4):
        m, *sums = stats[:, start:stop]
        u = tiles.centre_(logits.copy(start, stop, stats.dtype), m, temperature)
        grad = u.exp().div_(-sums[0][:, None])
        if entropy_weight is None:
            grad.mul_(total[start:stop, None])
        else:
            # where p is 0 u must not be -inf, nor become it
            u.masked_fill_(grad == 0, 0.0).sub_((sums[1] / sums[0])[:, None])
            u.mul_(entropy_weight[start:stop, None]).add_(total[start:stop, None])
            grad.mul_(u)
        _add_chosen(grad, columns[start:stop], weights[start:stop])
        grad.masked_fill_(skip[start:stop, None], 0.0)
        out[start:stop] = grad


def _weights(upstream: Tensor, columns: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What each id weighs `[N, K]`, and the rows in which none weighs anything."""
    upstream = upstream.masked_fill(columns == IGNORED, 0.0)
    bad = (columns == BAD) & (upstream != 0)
    return (upstream / temperature).masked_fill(bad, NAN), (upstream == 0).all(1)


def _add_chosen(grad: Tensor, columns: Tensor, weights: Tensor) -> None:
    """Add each weight at its column; one id at a time, so that duplicates have one order."""
    for k in range(columns.shape[1]):
        at = columns[:, k : k + 1].to(torch.int64)
        add = torch.where(at >= 0, weights[:, k : k + 1], 0.0)
        at = at.clamp(min=0)
        grad.scatter_(1, at, grad.gather(1, at) + add)
