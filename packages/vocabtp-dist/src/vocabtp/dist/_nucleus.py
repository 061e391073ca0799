"""The smallest set of top tokens that reaches a share of the probability, over shards.

Tokens carry integer weights (exp of the centred logit in units of 2**-40), so their sums are exact
and do not depend on how the vocabulary is cut. The set's last token is found like a radix select:
the tokens' order is a number of 32 + id bits, and each round sums the weights of the numbers that
share the prefix found so far by their next digit. One all_reduce a round, no host sync, no
candidate list that could be too short. Letters: `N` rows, `L` this shard's columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vocabtp.dist._noise import exact_exp
from vocabtp.dist._order import ordered_value

# weights of a whole row stay below 2**62 for vocabularies up to 4 million
_UNIT = 2.0**40


def digit_bits(vocab_size: int) -> int:
    """Bits of the order a round looks at: `2**bits` sums a row, no more than it has tokens."""
    return min(10, max(4, (vocab_size - 1).bit_length()))


def weights(values: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Integer weights of tokens relative to the row's largest logit.

    Args:
        values: `[N, L]` logits, no NaN, no +inf.
        top: `[N, 1]` the largest logit of the row over all shards.
        temperature: divides the logits.

    Returns:
        `[N, L]` int64, `2**40` for the top token, 0 for -inf.
    """
    # all ops in fp64, one at a time: a shard's cut must not change a bit
    x = (values.double() - top.double()) / temperature_like(top, temperature)
    return torch.round(exact_exp(x.clamp_min(-60.0)) * _UNIT).long()


def temperature_like(x: Tensor, temperature: float) -> Tensor:
    """The temperature as a device tensor: by a Python scalar CUDA multiplies with 1/T instead."""
    return torch.full((1, 1), temperature, dtype=torch.float64, device=x.device)


def share_of(total: Tensor, top_p: float) -> Tensor:
    """The weight that the set must reach: `ceil(top_p * total)`, at least 1; int64 -> int64."""
    target = torch.ceil(total.double() * top_p).long()
    return torch.minimum(target.clamp_min(1), total)


def nucleus(
    values: Tensor,
    ids: Tensor,
    weight: Tensor,
    top_p: float,
    vocab_size: int,
    all_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """Which tokens belong to the smallest top set whose weight is at least `top_p` of the row's.

    Args:
        values: `[N, L]` logits of this shard.
        ids: `[L]` their global ids.
        weight: `[N, L]` int64.
        top_p: share in (0, 1).
        vocab_size: columns over all shards.
        all_sum: the exact sum over ranks.

    Returns:
        `[N, L]` bool; a row without weight keeps nothing.
    """
    rows = values.shape[0]
    id_bits = max(1, (vocab_size - 1).bit_length())
    bits = 32 + id_bits
    order = ((ordered_value(values) + 2**31) << id_bits) | ((1 << id_bits) - 1 - ids)
    prefix = torch.zeros(rows, 1, dtype=torch.int64, device=values.device)
    missing: Tensor | None = None
    while bits > 0:
        step = min(digit_bits(vocab_size), bits)
        bits -= step
        digit = (order >> bits) & ((1 << step) - 1)
        live = torch.where((order >> (bits + step)) == prefix, weight, 0)
        sums = torch.zeros(rows, 1 << step, dtype=torch.int64, device=values.device)
        sums = all_sum(sums.scatter_add_(1, digit, live))
        from_top = sums.flip(1).cumsum(1).flip(1)  # weight of this digit and the larger ones
        if missing is None:
            missing = share_of(from_top[:, :1], top_p)
        chosen = (from_top >= missing).sum(1, keepdim=True) - 1
        missing = missing - (from_top - sums).gather(1, chosen)
        prefix = (prefix << step) | chosen
    return (order >= prefix) & (weight > 0)
