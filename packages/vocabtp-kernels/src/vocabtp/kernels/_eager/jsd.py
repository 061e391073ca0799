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
# working copies of `_terms`: what it fills, and what it holds besides
_PLANES, _MORE = 6, 1.75


def pair_stats(
    p: Rows, q: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
) -> ShardStats:
    """The first read: `(m_p, m_q; S_p, S_q)` `[1, *, N]`."""
    maxes = torch.empty(2, p.num_rows, dtype=dtype, device=p.device)
    sums = torch.empty_like(maxes)
    for here, u in tiles.working(p, dtype, 2, 0):
        p.copy_to(u[0], here.start)
        q.copy_to(u[1], here.start)
        maxes[:, here] = tiles.row_max(u)
        tiles.centre_(u, maxes[:, here], temperature)
        sums[:, here] = tiles.row_sum(u.exp_())
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
    for here, work in tiles.working(p, stats.sums.dtype, _PLANES, _MORE):
        known = stats.rows(here)
        summands, probs = _terms(p, q, known, here.start, temperature, beta, work)
        if clip is not None:
            summands[1:].masked_fill_(summands[0] > clip, 0.0)
            summands[0].clamp_(max=clip)
        summands[1:].mul_(probs)
        terms[:, here] = tiles.row_sum(summands)
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
    for here, work in tiles.working(p, stats.sums.dtype, _PLANES, _MORE):
        known = stats.rows(here)
        summands, probs = _terms(p, q, known, here.start, temperature, beta, work)
        if clip is not None:
            summands[1:].masked_fill_(summands[0] > clip, 0.0)
        for side, (out, weight) in enumerate(((out_p, 1.0 - beta), (out_q, beta))):
            if out is None:
                continue
            log_over_m = summands[1 + side]
            log_over_m.sub_(terms[1 + side, here, None]).mul_(probs[side])
            log_over_m.mul_((scale[here] * weight)[:, None])
            out[here] = log_over_m.masked_fill_(skip[here, None], 0.0)


def _terms(
    p: Rows,
    q: Rows,
    here: ShardStats,
    start: int,
    temperature: float,
    beta: float,
    work: Tensor,
) -> tuple[Tensor, Tensor]:
    """`(t, log(p/m), log(q/m))` before a clip and `(p, q)`; a log is 0 where its p or q is."""
    summands, probs, x = work[:3], work[3:5], work[5]
    t, log_p, log_q = summands
    p.copy_to(probs[0], start)
    q.copy_to(probs[1], start)
    tiles.centre_(probs, here.maxes, temperature)
    torch.sub(probs[1], probs[0], out=x)
    # NaN where both are masked; a NaN of the row itself shows in S
    x.sub_(log_ratio(here)[:, None]).nan_to_num_(nan=0.0, posinf=INF, neginf=-INF)
    probs.exp_().div_(here.sums[:2, :, None])
    _log_mix(x, beta, 1.0 - beta, out=log_p, spare=t)
    _log_mix(x.neg_(), 1.0 - beta, beta, out=log_q, spare=t)
    summands[1:].neg_().masked_fill_(probs == 0, 0.0)
    torch.mul(probs[1], log_q, out=t).mul_(beta).add_(probs[0] * log_p, alpha=1.0 - beta)
    e = x.neg_().expm1_()
    series = _series(e, beta).mul_(probs[0])
    torch.where(e.abs_() < _SERIES[e.dtype], series, t, out=t)
    return summands, probs


def _log_mix(y: Tensor, weight: float, rest: float, *, out: Tensor, spare: Tensor) -> None:
    """log(rest + w exp(y)) with rest = 1 - w, to full accuracy for every y in [-inf, inf]."""
    torch.expm1(y, out=out).mul_(weight).log1p_()
    # log1p loses digits close to -1, exp overflows above 88
    mix = torch.exp(y, out=spare).mul_(weight).add_(rest)
    small = mix < 0.5
    torch.where(small, mix.log_(), out, out=out)
    far = torch.add(y, math.log(weight), out=spare)
    torch.where(y > 80.0, far, out, out=out)


def _series(e: Tensor, beta: float) -> Tensor:
    total: Tensor | None = None
    for j in range(5, -1, -1):
        factor = (-1) ** j * beta * -math.expm1((j + 1) * math.log(beta)) / ((j + 1) * (j + 2))
        total = torch.full_like(e, factor) if total is None else total.mul_(e).add_(factor)
    assert total is not None
    return total.mul_(e).mul_(e)
