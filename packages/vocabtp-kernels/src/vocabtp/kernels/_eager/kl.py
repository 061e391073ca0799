"""KL(A || B): u_a and u_b are the centred logits, d = u_a - u_b, W = sum exp(u_a) d.

log a - log b = d + log(S_b / S_a), and log a - log b - KL is d - W / S_a exactly. With a clip c a
token's term is t = min(a (log a - log b), c); w is 1 where the term is below the cap, and
f = w (log a - log b + 1) is what the gradient to A needs of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels._eager import tiles
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF, ShardStats, log_ratio, pair_scale


def kl_stats(
    a: Rows, b: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
) -> ShardStats:
    """One read of each side: `(m_a, m_b; S_a, S_b, W; A supports what B masks)` `[1, *, N]`."""
    rows = a.num_rows
    maxes = torch.empty(2, rows, dtype=dtype, device=a.device)
    sums = torch.empty(3, rows, dtype=dtype, device=a.device)
    flags = torch.empty(1, rows, dtype=dtype, device=a.device)
    for start, stop in tiles.chunks(a, dtype, buffers=6):
        here = slice(start, stop)
        d, u_b = a.copy(start, stop, dtype), b.copy(start, stop, dtype)
        masked_b = u_b == -INF
        # on the logits, not the probabilities: a token that underflows is still supported
        flags[0, here] = (masked_b & (d != -INF)).any(1)
        maxes[0, here], maxes[1, here] = tiles.row_max(d), tiles.row_max(u_b)
        tiles.centre_(d, maxes[0, here], temperature)
        tiles.centre_(u_b, maxes[1, here], temperature)
        exps = d.exp()
        d.sub_(u_b).mul_(exps)
        # 0 * inf where A is masked; a NaN of the row itself shows in S
        d.masked_fill_(masked_b, 0.0).nan_to_num_(nan=0.0, posinf=INF, neginf=-INF)
        sums[2, here] = tiles.row_sum(d)
        sums[0, here] = tiles.row_sum(exps)
        sums[1, here] = tiles.row_sum(u_b.exp_())
    return ShardStats(maxes[None], sums[None], flags[None])


def kl_terms(
    a: Rows, b: Rows, stats: ShardStats, temperature: float, clip: float, *, merged: bool
) -> Tensor:
    """The second read that a clip costs: `[1, 3, N]` sums of t, a f and w a over this shard."""
    terms = torch.zeros(3, a.num_rows, dtype=stats.sums.dtype, device=a.device)
    for start, stop in tiles.chunks(a, stats.sums.dtype, buffers=10):
        sides = _sides(a, b, stats.rows(start, stop), start, stop, temperature)
        p_a, _, ratio = sides
        below, term = _clip(sides, stats.rows(start, stop), clip)
        terms[0, start:stop] = tiles.row_sum(term.clamp_(max=clip))
        p_a.masked_fill_(~below, 0.0)
        terms[2, start:stop] = tiles.row_sum(p_a.clone())
        ratio.masked_fill_(~below, 0.0).add_(1.0)
        terms[1, start:stop] = tiles.row_sum(ratio.mul_(p_a))
    return terms[None]


def kl_grad(
    a: Rows,
    b: Rows,
    stats: ShardStats,
    terms: Tensor | None,
    upstream: Tensor,
    factor: float,
    out_a: Tensor | None,
    out_b: Tensor | None,
    temperature: float,
    clip: float | None,
) -> None:
    """One more read, one write a side: `upstream` `[N]` times `factor` times the gradients."""
    scale, skip = pair_scale(upstream, stats, factor)
    for start, stop in tiles.chunks(a, stats.sums.dtype, buffers=10):
        here = stats.rows(start, stop)
        sides = _sides(a, b, here, start, stop, temperature)
        if clip is None:
            grad_a, grad_b = _plain_grad(sides, here)
        else:
            assert terms is not None
            grad_a, grad_b = _clipped_grad(sides, here, terms[:, start:stop], clip)
        for out, grad in ((out_a, grad_a), (out_b, grad_b)):
            if out is not None:
                grad.mul_(scale[start:stop, None])
                out[start:stop] = grad.masked_fill_(skip[start:stop, None], 0.0)


def _sides(
    a: Rows, b: Rows, here: ShardStats, start: int, stop: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and d, which is +inf where only B is masked and NaN where both are."""
    dtype = here.sums.dtype
    d = tiles.centre_(a.copy(start, stop, dtype), here.maxes[0], temperature)
    u_b = b.copy(start, stop, dtype)
    masked = u_b == -INF if temperature < 1.0 else None
    tiles.centre_(u_b, here.maxes[1], temperature)
    if masked is not None:
        # a low number that overflows is no mask; clamp keeps NaN
        u_b.clamp_(min=torch.finfo(dtype).min).masked_fill_(masked, -INF)
    p_a = d.exp().div_(here.sums[0, :, None])
    d.sub_(u_b)
    return p_a, u_b.exp_().div_(here.sums[1, :, None]), d


def _plain_grad(sides: tuple[Tensor, Tensor, Tensor], here: ShardStats) -> tuple[Tensor, Tensor]:
    p_a, p_b, d = sides
    centre = here.sums[2] / here.sums[0]
    centre = centre.masked_fill(here.flags[0] != 0, INF)[:, None]
    # a token without probability has no d; with an infinite KL even 0 times it is not finite
    return d.masked_fill_(p_a == 0, 0.0).sub_(centre).mul_(p_a), p_b.sub_(p_a)


def _clip(
    sides: tuple[Tensor, Tensor, Tensor], here: ShardStats, clip: float
) -> tuple[Tensor, Tensor]:
    """Turn d into log(a / b), 0 where infinite; which terms are below the cap, and the terms."""
    p_a, _, ratio = sides
    outside = ratio == INF
    ratio.add_(log_ratio(here)[:, None])
    ratio.masked_fill_(~ratio.isfinite(), 0.0)
    term = (p_a * ratio).masked_fill_(outside, INF)
    return term <= clip, term


def _clipped_grad(
    sides: tuple[Tensor, Tensor, Tensor], here: ShardStats, terms: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    p_a, p_b, ratio = sides
    above = ~_clip(sides, here, clip)[0]
    grad_a = ratio.add_(1.0).masked_fill_(above, 0.0).sub_(terms[1, :, None]).mul_(p_a)
    p_b.mul_(terms[2, :, None])
    return grad_a, p_b.sub_(p_a.masked_fill_(above, 0.0))
