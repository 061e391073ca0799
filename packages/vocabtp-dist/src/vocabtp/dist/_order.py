"""One total order of a row's tokens: by logit, descending, equal logits by id, ascending.

Everything that picks tokens uses it, so ties fall the same way wherever the vocabulary is cut.
Logits are read as fp32 (exact for bf16, fp16 and fp32; fp64 is rounded). A NaN counts as -inf, so
that no rank can be the only one to see it; -0.0 equals 0.0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# of an id slot that holds no token: below every real one, which has an inverted id >= 1
NO_TOKEN = -(2**63)
_ID_MASK = 0xFFFFFFFF


def clean(logits: Tensor) -> Tensor:
    """Logits with NaN as -inf and fp64 as fp32; a new tensor, `[..., L]`, dtype at most fp32."""
    x = logits.detach()
    if x.dtype == torch.float64:
        x = x.float()
    return torch.nan_to_num(x, nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def ordered_value(values: Tensor) -> Tensor:
    """int64 in `[-2**31, 2**31)` that order as the values do; `[*]` fp32-exact -> `[*]`."""
    # adding 0.0 turns -0.0 into 0.0
    bits = (values.float() + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def value_of(ordered: Tensor) -> Tensor:
    """Inverse of `ordered_value`; int64 -> fp32."""
    bits = ordered.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """`(value, id)` as one int64: a larger one is a larger value, or an equal one of lower id."""
    return (ordered_value(values) << 32) | (_ID_MASK - ids)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """`(values fp32, ids int64)` of packed tokens."""
    return value_of(packed >> 32), _ID_MASK - (packed & _ID_MASK)
