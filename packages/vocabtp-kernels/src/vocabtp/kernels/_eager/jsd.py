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
# working copies: what is filled, and what is held besides
_TERMS = 6, 1.25
_LOGS = {1: (4, 0.5), 2: (6, 0.5)}  # of so many sides
_BOTH = slice(0, 2)


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
    for here, work in tiles.working(p, stats.sums.dtype, *_TERMS):
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
    sides = slice(0 if out_p is not None else 1, 2 if out_q is not None else 1)
    asked = [(out, w) for out, w in ((out_p, 1.0 - beta), (out_q, beta)) if out is not None]
    # without a clip neither t is needed nor the log of a side that nobody asks for
    planes, more = _LOGS[len(asked)] if clip is None else _TERMS
    for here, work in tiles.working(p, stats.sums.dtype, planes, more):
        known = stats.rows(here)
        if clip is None:
            logs, probs, _ = _logs(p, q, known, here.start, temperature, beta, sides, work)
        else:
            summands, probs = _terms(p, q, known, here.start, temperature, beta, work)
            logs, probs = summands[1:][sides], probs[sides]
            logs.masked_fill_(summands[0] > clip, 0.0)
        logs.sub_(terms[1:, here, None][sides]).mul_(probs)
        for (out, weight), log_over_m in zip(asked, logs, strict=True):
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
    logs, probs, minus_x = _logs(p, q, here, start, temperature, beta, _BOTH, work)
    t = work[0]
    torch.mul(probs[1], logs[1], out=t).mul_(beta).add_(probs[0] * logs[0], alpha=1.0 - beta)
    e = minus_x.neg_().expm1_()
    series = _series(e, beta).mul_(probs[0])
    torch.where(e.abs_() < _SERIES[e.dtype], series, t, out=t)
    return work[:3], probs


def _logs(
    p: Rows,
    q: Rows,
    here: ShardStats,
    start: int,
    temperature: float,
    beta: float,
    sides: slice,
    work: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(log(p/m), log(q/m))` in `work[1:]` and `(p, q)`, those of `sides`; and -x."""
    number = sides.stop - sides.start
    spare, logs, both = work[0], work[1 : 1 + number], work[1 + number : 3 + number]
    # in the place of the logits that are not needed again, if there are such
    x = work[-1] if number == 2 else both[1 - sides.start]
    p.copy_to(both[0], start)
    q.copy_to(both[1], start)
    tiles.centre_(both, here.maxes, temperature)
    torch.sub(both[1], both[0], out=x)
    # NaN where both are masked; a NaN of the row itself shows in S
    x.sub_(log_ratio(here)[:, None]).nan_to_num_(nan=0.0, posinf=INF, neginf=-INF)
    probs = both[sides].exp_().div_(here.sums[:2][sides, :, None])
    if sides.start == 0:
        _log_mix(x, beta, 1.0 - beta, out=logs[0], spare=spare)
    x.neg_()
    if sides.stop == 2:
        _log_mix(x, 1.0 - beta, beta, out=logs[-1], spare=spare)
    logs.neg_().masked_fill_(probs == 0, 0.0)
    return logs, probs, x


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
