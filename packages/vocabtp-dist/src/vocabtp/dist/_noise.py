"""Counter-based noise, and the logarithm and exponential that keep it the same everywhere.

Noise is a function of (key, id) alone, so a rank draws it for its own columns and every layout of
the vocabulary draws the same. Equal inputs must then give equal bits, whatever the shape, stride
or device of the tensor they sit in. Vendor `exp` and `log` do not promise that (a vector body and
its scalar tail may round apart), so both are written here in IEEE fp64 additions, multiplications
and divisions, one eager op each, which nothing can contract or reorder.

The hash: `s = mix(key)`, then `mix(mix(id * golden + s) ^ mix(~s))`, with `mix` the 64-bit
finalizer of SplitMix64. The inner stream is SplitMix64 itself with the id as its counter; its
second seed must not be a term of that stream, or one id gets the same noise from every key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# int64 arithmetic wraps modulo 2**64; constants above 2**63 enter as their negative twins
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_LN2_HI = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LO = 1.90821492927058770002e-10  # ln 2 minus the 32 bits above
_MANTISSA = (1 << 52) - 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (`>>` is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit integers; int64 `[*]` -> `[*]`."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """52 uniform bits of each (key, id); int64, shapes broadcast."""
    start = mix(keys)
    x = mix(ids * _GOLDEN + start)
    return _shift_right(mix(x ^ mix(~start)), 12)


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """fp64 in the open interval (0, 1): odd multiples of 2**-53, so never 0 and never 1."""
    return (noise_bits(keys, ids).double() + 0.5) * 2.0**-52


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each (key, id) in fp64; shapes broadcast.

    52 bits: the largest value is 36.7, which a vocabulary of 150,000 tokens meets about once in
    3e10 draws, and values near it are spaced far finer than the logits they are added to.
    """
    return -exact_log(-exact_log(uniform(keys, ids)))


def exact_log(x: Tensor) -> Tensor:
    """Natural logarithm of normal fp64 numbers > 0, the same bits in every layout."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1022
    m = ((bits & _MANTISSA) | (1022 << 52)).view(torch.float64)  # [0.5, 1)
    low = m < math.sqrt(0.5)
    m = torch.where(low, m * 2.0, m)
    exponent = (exponent - low.long()).double()
    # log m = 2 atanh(s), |s| <= 0.1716
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = torch.full_like(t, 1.0 / 21.0)
    for n in range(19, 0, -2):
        series = series * t + 1.0 / n
    return exponent * _LN2_HI + (exponent * _LN2_LO + 2.0 * s * series)


def exact_exp(x: Tensor) -> Tensor:
    """Exponential of fp64 numbers in [-700, 700], the same bits in every layout."""
    n = torch.round(x * (1.0 / math.log(2.0)))
    r = (x - n * _LN2_HI) - n * _LN2_LO
    series = torch.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        series = series * r + 1.0 / math.factorial(k)
    return series * ((n.long() + 1023) << 52).view(torch.float64)
