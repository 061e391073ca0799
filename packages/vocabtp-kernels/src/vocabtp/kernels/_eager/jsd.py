"""Generalized JSD, m = beta q + (1 - beta) p with 0 < beta < 1, from x = log q - log p.

log(m/p) = log1p(beta (q/p - 1)) and log(m/q) = log1p((1 - beta) (p/q - 1)). A token's term is
t = -beta q log(m/q) - (1 - beta) p log(m/p). Both summands are of the order of x and their sum of
the order of x^2, so that nearly equal distributions would lose all digits: for small e = q/p - 1
the term is its series, p beta e^2 sum_j (-1)^j (1 - beta^(j+1)) e^j / ((j + 1) (j + 2)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vocabtp.kernels._eager import tiles
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF, ShardStats, log_ratio, pair_scale

# up to here six terms of the series are exact; beyond it the plain form loses 5 (fp64: 10) bits
_SERIES = {torch.float32: 2.0**-5, torch.float64: 2.0**-10}
_BUFFERS = 16


def pair_stats(
    p: Rows, q: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
) -> ShardStats:
    """The first read: `(m_p, m_q; S_p, S_q)` `[1, *, N]`."""
    maxes = torch.empty(2, p.num_rows, dtype=dtype, device=p.device)
    sums = torch.empty_like(maxes)
    for side, logits in enumerate((p, q)):
        for start, stop in tiles.chunks(logits, dtype, buffers=3):
            u = logits.copy(start, stop, dtype)
            maxes[side, start:stop] = tiles.row_max(u)
            tiles.centre_(u, maxes[side, start:stop], temperature)
            sums[side, start:stop] = tiles.row_sum(u.exp_())
    return ShardStats(maxes[None], sums[None], maxes.new_zeros(1, 0, p.num_rows))


def jsd_terms(
    p: Rows,
    q: Rows,
    stats: ShardStats,
    temperature: float,
    beta: float,
    clip: float | None,
    *,
    merged: bool,
) -> Tensor:
    """The second read: `[1, 3, N]` sums of t (capped), w p log(p/m) and w q log(q/m)."""
    terms = torch.empty(3, p.num_rows, dtype=stats.sums.dtype, device=p.device)
    for start, stop in tiles.chunks(p, stats.sums.dtype, _BUFFERS):
        p_p, p_q, log_p, log_q, term = _terms(
            p, q, stats.rows(start, stop), start, stop, temperature, beta
        )
        if clip is not None:
            above = term > clip
            log_p.masked_fill_(above, 0.0)
            log_q.masked_fill_(above, 0.0)
            term.clamp_(max=clip)
        terms[0, start:stop] = tiles.row_sum(term)
        terms[1, start:stop] = tiles.row_sum(log_p.mul_(p_p))
        terms[2, start:stop] = tiles.row_sum(log_q.mul_(p_q))
    return terms[None]


def jsd_grad(
    p: Rows,
    q: Rows,
    stats: ShardStats,
    terms: Tensor,
    upstream: Tensor,
    factor: float,
    out_p: Tensor | None,
    out_q: Tensor | None,
    temperature: float,
    beta: float,
    clip: float | None,
) -> None:
    """One more read, one write a side: `upstream` `[N]` times `factor` times the gradients."""
    scale, skip = pair_scale(upstream, stats, factor)
    for start, stop in tiles.chunks(p, stats.sums.dtype, _BUFFERS):
        p_p, p_q, log_p, log_q, term = _terms(
            p, q, stats.rows(start, stop), start, stop, temperature, beta
        )
        sides = ((out_p, p_p, log_p, 1.0 - beta, 1), (out_q, p_q, log_q, beta, 2))
        for out, prob, log_over_m, weight, index in sides:
            if out is None:
                continue
            if clip is not None:
                log_over_m.masked_fill_(term > clip, 0.0)
            log_over_m.sub_(terms[index, start:stop, None]).mul_(prob)
            log_over_m.mul_((scale[start:stop] * weight)[:, None])
            out[start:stop] = log_over_m.masked_fill_(skip[start:stop, None], 0.0)


def _terms(
    p: Rows, q: Rows, here: ShardStats, start: int, stop: int, temperature: float, beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p, q, log(p/m), log(q/m) - 0 where p or q is 0 - and the terms before a clip."""
    dtype = here.sums.dtype
    u_p = tiles.centre_(p.copy(start, stop, dtype), here.maxes[0], temperature)
    x = tiles.centre_(q.copy(start, stop, dtype), here.maxes[1], temperature)
    prob_q = x.exp().div_(here.sums[1, :, None])
    x.sub_(u_p).sub_(log_ratio(here)[:, None])
    # NaN where both are masked; a NaN of the row itself shows in S
    x.nan_to_num_(nan=0.0, posinf=INF, neginf=-INF)
    prob_p = u_p.exp_().div_(here.sums[0, :, None])
    log_p = _log_mix(x, beta, 1.0 - beta).neg_().masked_fill_(prob_p == 0, 0.0)
    log_q = _log_mix(-x, 1.0 - beta, beta).neg_().masked_fill_(prob_q == 0, 0.0)
    plain = (prob_q * log_q).mul_(beta).add_(prob_p * log_p, alpha=1.0 - beta)
    e = x.expm1_()
    near = e.abs() < _SERIES[dtype]
    return prob_p, prob_q, log_p, log_q, torch.where(near, _series(e, beta).mul_(prob_p), plain)


def _log_mix(y: Tensor, weight: float, rest: float) -> Tensor:
    """log(rest + w exp(y)) with rest = 1 - w, to full accuracy for every y in [-inf, inf]."""
    far = y + math.log(weight)
    mix = y.exp().mul_(weight).add_(rest)
    near = y.expm1().mul_(weight).log1p_()
    # log1p loses digits close to -1, exp overflows above 88
    near = torch.where(mix < 0.5, mix.log(), near)
    return torch.where(y > 80.0, far, near)


def _series(e: Tensor, beta: float) -> Tensor:
    total = torch.zeros_like(e)
    for j in range(5, -1, -1):
        factor = (-1) ** j * beta * -math.expm1((j + 1) * math.log(beta)) / ((j + 1) * (j + 2))
        total.mul_(e).add_(factor)
    return total.mul_(e).mul_(e)
