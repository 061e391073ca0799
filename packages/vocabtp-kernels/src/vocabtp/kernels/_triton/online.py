"""Helpers on the device: running maxima, sums of a fixed order.

A program keeps `TILE` slots, and slot j sees the columns j, j + TILE, j + 2 TILE and so on of its
segment, four of them a step. Every step is element-wise over the slots, so that neither the dtype
nor the alignment of the logits, nor anything else that decides which thread holds a slot, can
change a bit. Slots are put together by `fold`, which adds neighbours pair by pair first.

A slot's running maximum starts at the lowest finite number rather than at -inf: then no step forms
-inf - -inf, and a masked logit has exp2(-inf) = 0.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
INF = tl.constexpr(float("inf"))


@triton.jit
def raise_max(m, x0, x1, x2, x3, c):
    """The new maximum, the shift to it from the old one, and exp2 of that shift."""
    new = tl.maximum(m, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
    # a shift of -inf would meet a sum of 0
    shift = tl.maximum(m - new, LOWEST)
    return new, shift, tl.exp2(shift * c)


@triton.jit
def fold(x, phase, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """The sum of `TILE` slots, in one order whichever thread holds which slot."""
    if SHIFT:
        x = tl.gather(x, (tl.arange(0, TILE) + phase) % TILE, 0)
    a, b = tl.split(tl.reshape(x, [TILE // 2, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE // 4, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE // 8, 2]))
    return tl.sum(a + b, 0)


@triton.jit
def seen_max(m, s):
    """What is reported as the maximum: -inf without support, NaN where the sum is NaN."""
    return tl.where(s == 0.0, -float("inf"), tl.where(s == s, m, float("nan")))


@triton.jit
def finite_max(m):
    return tl.maximum(m, LOWEST)


@triton.jit
def moved(total, shift, c):
    """A sum centred elsewhere; `shift` is the old centre minus the new one."""
    weight = tl.exp2(shift * c)
    # 0 * inf, far below the maximum; a NaN stays
    return tl.where((weight == 0.0) & (total == total), 0.0, weight * total)


@triton.jit
def moved_weighted(weighted, total, shift, other_shift, c, scale):
    """A weighted sum centred elsewhere; `scale` turns shifts into its unit."""
    weight = tl.exp2(shift * c)
    # the sum moved first: a shift may be as large as a number can be
    sum_ = weight * weighted + (shift - other_shift) * (scale * (weight * total))
    return tl.where((weight == 0.0) & (total == total), 0.0, sum_)
