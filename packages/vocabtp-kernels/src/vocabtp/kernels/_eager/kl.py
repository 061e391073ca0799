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
    for here, work in tiles.working(a, dtype, 3, 1):
        # exp(u_a), u_b and then its exp, u_a and then exp(u_a) d
        exps, u_b, d = work
        a.copy_to(d, here.start)
        masked_b = b.copy_to(u_b, here.start) == -INF
        # on the logits, not the probabilities: a token that underflows is still supported
        flags[0, here] = (masked_b & (d != -INF)).any(1)
        most = tiles.row_max(work[1:])
        tiles.centre_(work[1:], most, temperature)
        maxes[0, here], maxes[1, here] = most[1], most[0]
        torch.exp(d, out=exps)
        d.sub_(u_b).mul_(exps)
        # 0 * inf where A is masked; a NaN of the row itself shows in S
        d.masked_fill_(masked_b, 0.0).nan_to_num_(nan=0.0, posinf=INF, neginf=-INF)
        u_b.exp_()
        sums[:, here] = tiles.row_sum(work)
    return ShardStats(maxes[None], sums[None], flags[None])


def kl_terms(
    a: Rows, b: Rows, stats: ShardStats, temperature: float, clip: float, *, merged: bool
) -> Tensor:
    """The second read that a clip costs: `[1, 3, N]` sums of t, a f and w a over this shard."""
    terms = torch.zeros(3, a.num_rows, dtype=stats.sums.dtype, device=a.device)
    for here, sides in tiles.working(a, stats.sums.dtype, 3, 1):
        known = stats.rows(here)
        _sides(a, b, known, here.start, temperature, out=sides)
        term, ratio, p_a = sides  # b's place is free
        above = _clip(sides, known, clip, out=term)
        term.clamp_(max=clip)
        p_a.masked_fill_(above, 0.0)
        ratio.masked_fill_(above, 0.0).add_(1.0).mul_(p_a)
        terms[:, here] = tiles.row_sum(sides)
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
    for here, work in tiles.working(a, stats.sums.dtype, 3 if clip is None else 4, 1):
        known, sides = stats.rows(here), work[:3]
        _sides(a, b, known, here.start, temperature, out=sides)
        capped = None
        if clip is not None:
            assert terms is not None
            capped = _clip(sides, known, clip, out=work[3]), terms[:, here]
        # A's first: B's changes a
        for out, gradient in ((out_a, _grad_a), (out_b, _grad_b)):
            if out is not None:
                grad = gradient(sides, known, capped).mul_(scale[here, None])
                out[here] = grad.masked_fill_(skip[here, None], 0.0)


def _sides(
    a: Rows, b: Rows, here: ShardStats, start: int, temperature: float, *, out: Tensor
) -> None:
    """`(u_b, d, a)` into `out` `[3, n, L]`: d is +inf where only B is masked, NaN where both."""
    u_b, d, p_a = out
    a.copy_to(d, start)
    b.copy_to(u_b, start)
    masked = u_b == -INF if temperature < 1.0 else None
    tiles.centre_(out[:2], here.maxes.flip(0), temperature)
    if masked is not None:
        # a low number that overflows is no mask; clamp keeps NaN
        u_b.clamp_(min=torch.finfo(out.dtype).min).masked_fill_(masked, -INF)
    torch.exp(d, out=p_a).div_(here.sums[0, :, None])
    d.sub_(u_b)


def _clip(sides: Tensor, here: ShardStats, clip: float, *, out: Tensor) -> Tensor:
    """Turn d into log(a / b), 0 where infinite; t into `out`. Returns which t are above the cap."""
    _, ratio, p_a = sides
    outside = ratio == INF
    ratio.add_(log_ratio(here)[:, None]).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    torch.mul(p_a, ratio, out=out).masked_fill_(outside, INF)
    return (out <= clip).logical_not_()


def _grad_a(sides: Tensor, here: ShardStats, capped: tuple[Tensor, Tensor] | None) -> Tensor:
    """In the place of d; `capped` are the tokens above a clip and the sums of `kl_terms`."""
    d, p_a = sides[1], sides[2]
    if capped is not None:
        above, terms = capped
        return d.add_(1.0).masked_fill_(above, 0.0).sub_(terms[1, :, None]).mul_(p_a)
    centre = here.sums[2] / here.sums[0]
    centre = centre.masked_fill(here.flags[0] != 0, INF)[:, None]
    # a token without probability has no d; with an infinite KL even 0 times it is not finite
    return d.masked_fill_(p_a == 0, 0.0).sub_(centre).mul_(p_a)


def _grad_b(sides: Tensor, here: ShardStats, capped: tuple[Tensor, Tensor] | None) -> Tensor:
    """In the place of u_b; changes a."""
    p_b, p_a = sides[0].exp_().div_(here.sums[1, :, None]), sides[2]
    if capped is not None:
        above, terms = capped
        p_b.mul_(terms[2, :, None])
        p_a.masked_fill_(above, 0.0)
    return p_b.sub_(p_a)
