"""Statistics of rows: what a rank knows, how ranks put it together, what follows from it.

Letters: m is a row's maximum, u = (x - m) / T the centred logit, S = sum exp(u). W is
sum exp(u) u for the entropy and sum exp(u_a) (u_a - u_b) for KL(A || B). A rank centres on the
maximum of its own columns; moving the centre by s = (m_rank - m) / T multiplies a sum by exp(s)
and adds s S to W first. No step here forms -inf - -inf for a rank without support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels._exchange import LOCAL, Exchange

INF = float("inf")
NAN = float("nan")


class ShardStats(NamedTuple):
    """What one rank knows of its rows: all that crosses the wire.

    fp32, fp64 for fp64 logits. A shard without columns, or without support, has maxes of -inf and
    zeros elsewhere.
    """

    maxes: Tensor  # [M, N] the largest logit of each side, before the temperature
    sums: Tensor  # [S, N] centred on this rank's maxes
    flags: Tensor  # [F, N] 0 unless a rank has something to report of the row

    def rows(self, rows: slice) -> ShardStats:
        """Those of some rows."""
        return ShardStats(*(part[:, rows] for part in self))


class TokenShard(NamedTuple):
    """What a rank knows of the tokens that it was asked for."""

    stats: ShardStats  # `[P, *, N]` of P parts of each row
    chosen: Tensor  # [N, K] the logits at the ids' columns, 0 for what is no column of this shard


class TokenValues(NamedTuple):
    """The values, and what the backward needs of them."""

    logprobs: Tensor  # [N, K]
    entropies: Tensor | None  # [N]
    stats: Tensor  # [3 or 4, N]: m and S, whether an id anywhere is bad, W


def gather(parts: ShardStats, exchange: Exchange) -> ShardStats:
    """All ranks' statistics `[R, *, N]`, by one exchange; a single rank keeps its parts.

    Ranks hand in one part each, `[1, *, N]`.
    """
    if exchange is LOCAL:
        return parts
    sizes = [part.shape[1] for part in parts]
    together = exchange.gather(torch.cat([part[0] for part in parts]))
    return ShardStats(*torch.split(together, sizes, dim=1))


def gather_terms(parts: Tensor, exchange: Exchange) -> Tensor:
    """The same of sums, `[1, *, N]` to `[R, *, N]`."""
    return parts if exchange is LOCAL else exchange.gather(parts[0])


def in_rank_order(parts: Tensor) -> Tensor:
    """Sum `[R, *]` over ranks in one fixed order, so that every rank gets the same bits."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def merge_softmax(stats: ShardStats, temperature: float) -> ShardStats:
    """Merge gathered `(m; S)` or `(m; S, W)` of one distribution, or `(m_a, m_b; S_a, S_b)`."""
    maxes, weights, shifts = _recentre(stats.maxes, temperature)
    if stats.sums.shape[1] == 2 and stats.maxes.shape[1] == 1:
        total, weighted = stats.sums[:, 0], stats.sums[:, 1]
        sums = torch.stack((total, weighted + shifts[:, 0] * total), dim=1)
    else:
        sums = stats.sums
    return ShardStats(maxes, in_rank_order(_weigh(weights, sums)), stats.flags.abs().amax(0))


def merge_kl(stats: ShardStats, temperature: float) -> ShardStats:
    """Merge gathered `(m_a, m_b; S_a, S_b, W; support flag)`."""
    maxes, weights, shifts = _recentre(stats.maxes, temperature)
    total_a, total_b, weighted = stats.sums.unbind(1)
    moved = weighted + (shifts[:, 0] - shifts[:, 1]) * total_a
    sums = torch.stack((total_a, total_b, moved), dim=1)
    weights = torch.stack((weights[:, 0], weights[:, 1], weights[:, 0]), dim=1)
    return ShardStats(maxes, in_rank_order(_weigh(weights, sums)), stats.flags.amax(0))


def _recentre(maxes: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Overall maxima `[M, N]`; factors and shifts `[R, M, N]` of each rank."""
    top = maxes.amax(0)
    # a rank without support has sums of 0, which no finite shift changes
    shifts = ((maxes - top) / temperature).masked_fill(maxes == -INF, 0.0)
    return top, shifts.exp(), shifts


def _weigh(weights: Tensor, sums: Tensor) -> Tensor:
    # a rank far below the maximum has weight 0 and may have a shift of -inf
    return torch.where(weights == 0, 0.0, weights * sums)


def undefined(stats: ShardStats, sides: int) -> Tensor:
    """Rows `[N]` in which a side has no support at all."""
    return (stats.sums[:sides] == 0).any(0)


def poisoned(stats: ShardStats, sides: int) -> Tensor:
    """Rows `[N]` in which a side has a NaN or +inf logit."""
    return stats.sums[:sides].isnan().any(0)


def finish_logprobs(stats: ShardStats, chosen: Tensor, temperature: float) -> Tensor:
    """Log p `[N, K]` of the chosen logits `[N, K]`, -inf at a masked one."""
    centred = (chosen - stats.maxes[0, :, None]) / temperature
    values: Tensor = centred - stats.sums[0, :, None].log()
    return values.masked_fill(undefined(stats, 1)[:, None], NAN)


def finish_entropy(stats: ShardStats) -> Tensor:
    """H = log S - W / S `[N]`; 0 / 0 makes an undefined row NaN."""
    total, weighted = stats.sums[0], stats.sums[1]
    return total.log() - weighted / total


def log_ratio(stats: ShardStats) -> Tensor:
    """log(S_b / S_a) `[N]`: what turns u_a - u_b into log a - log b."""
    return (stats.sums[1] / stats.sums[0]).log()


def merge_pair(parts: ShardStats, temperature: float) -> ShardStats:
    """`(m_p, m_q; S_p, S_q)` of whole rows from `[P, *, N]`."""
    return _merge(merge_softmax, parts, temperature)


def finish_kl(parts: ShardStats, temperature: float) -> tuple[Tensor, ShardStats]:
    """KL(A || B) = W / S_a + log(S_b / S_a) `[N]`, +inf outside B's support, NaN before that.

    From `[P, *, N]`; also returns the statistics of whole rows.
    """
    stats = _merge(merge_kl, parts, temperature)
    values = stats.sums[2] / stats.sums[0] + log_ratio(stats)
    values = values.masked_fill(stats.flags[0] != 0, INF)
    return or_nan(values, stats), stats


def _merge(
    how: Callable[[ShardStats, float], ShardStats], parts: ShardStats, temperature: float
) -> ShardStats:
    if parts.maxes.shape[0] == 1:
        return ShardStats(*(part[0] for part in parts))
    return how(parts, temperature)


def finish_terms(parts: Tensor, stats: ShardStats, scale: float) -> tuple[Tensor, Tensor]:
    """The first of `[P, 3, N]` times `scale` `[N]`, NaN where a side does not exist; all three."""
    terms = in_rank_order(parts)
    return or_nan(terms[0] * scale, stats), terms


def pair_scale(upstream: Tensor, stats: ShardStats, factor: float) -> tuple[Tensor, Tensor]:
    """`[N]` upstream times `factor`, NaN in rows with a NaN, and the rows of gradient 0."""
    scale = (upstream * factor).masked_fill(poisoned(stats, 2), NAN)
    return scale, (upstream == 0) | undefined(stats, 2)


def or_nan(values: Tensor, stats: ShardStats) -> Tensor:
    """`values` `[N]` of two distributions, NaN where one of them does not exist."""
    return values.masked_fill(undefined(stats, 2) | poisoned(stats, 2), NAN)
