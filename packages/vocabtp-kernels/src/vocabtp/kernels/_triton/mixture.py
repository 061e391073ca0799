"""log(p/m) and log(q/m) of the mixture m = beta q + (1 - beta) p, from x = log q - log p.

Let s be the smaller of p and q and w its share of m, r = s / max(p, q) = exp(-|x|). With
g = log(1 + w (r - 1)) the larger side's log over m is -g and the smaller side's -g - |x|: nothing
overflows, and one logarithm serves both. Two ways to get g:

- `quick`, everything to base 2: the logarithm of 1 - w + w r, off by 1e-7 whatever g is. Not
  enough where p and q nearly agree.
- `exact`: for |x| below `_NEAR` the series of A = log(m/p) in x, A = beta x (1 + (1 - beta) G) and
  log(q/m) = (1 - beta) x (1 - beta G), which keep all digits at every beta; G / x has the cumulants
  of a coin with chance beta as coefficients, and a token's term is
  p beta (1 - beta) x (E - G (1 + beta E)) with E = exp(x) - 1. Elsewhere the quick way, or, with
  beta close to an end, log1p for each side.
"""

import math

import triton
import triton.language as tl

from vocabtp.kernels._triton import launch

_NEAR = tl.constexpr(0.125)
_FAR = tl.constexpr(150.0)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(launch.LOG2E)


def series(beta: float) -> tuple[float, ...]:
    """Coefficients of G / x: the cumulants 2 to 7 over n! beta (1 - beta)."""
    v = beta * (1.0 - beta)
    skew = 1.0 - 2.0 * beta
    cumulants = (
        1.0,
        skew,
        1.0 - 6.0 * v,
        skew * (1.0 - 12.0 * v),
        1.0 - 30.0 * v + 120.0 * v * v,
        skew * (1.0 - 60.0 * v + 360.0 * v * v),
    )
    return tuple(k / math.factorial(n) for n, k in enumerate(cumulants, start=2))


@triton.jit
def log2_of(y, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(y)


@triton.jit
def _exp2_minus(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        # as an instruction of its own the sign would not be free
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp2(-x)


@triton.jit
def quick(x2, beta, rest, HARDWARE: tl.constexpr):
    """For x to base 2: r, m over the larger side, g and |x|."""
    q_larger = x2 > 0.0
    # NaN, where both sides are masked, compares false
    far = tl.abs(x2)
    far = tl.where(far < _FAR, far, _FAR)
    r = _exp2_minus(far, HARDWARE)
    mix = tl.where(q_larger, beta, rest) + tl.where(q_larger, rest, beta) * r
    return r, mix, log2_of(mix, HARDWARE), far


@triton.jit
def add_by_sign(sum_p, sum_q, x, small, log_small, large, log_large, HARDWARE: tl.constexpr):
    """Add the larger side's product to the sum of q where x > 0, else to that of p."""
    if HARDWARE:
        # four instructions under a predicate; selecting first would take six
        return tl.inline_asm_elementwise(
            """{
            .reg .pred q;
            setp.gt.f32 q, $4, 0f00000000;
            mov.f32 $0, $2;
            mov.f32 $1, $3;
            @q fma.rn.f32 $0, $5, $6, $0;
            @q fma.rn.f32 $1, $7, $8, $1;
            @!q fma.rn.f32 $0, $7, $8, $0;
            @!q fma.rn.f32 $1, $5, $6, $1;
            }""",
            "=&f,=&f,f,f,f,f,f,f,f",
            [sum_p, sum_q, x, small, log_small, large, log_large],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        t_small, t_large = small * log_small, large * log_large
        q_larger = x > 0.0
        sum_p += tl.where(q_larger, t_small, t_large)
        sum_q += tl.where(q_larger, t_large, t_small)
        return sum_p, sum_q


@triton.jit
def _log_mix(y, weight, rest):
    """log(rest + w exp(y)) with rest = 1 - w, to full accuracy away from y = 0."""
    e = tl.exp(y)
    z = weight * (e - 1.0)
    low = weight * e + rest
    mix = 1.0 + z
    # log1p: what rounding took from 1 + z comes back; close to 0 the plain sum has more digits
    lost = tl.where((low < 0.5) | (mix > 2.0), 0.0, z - (mix - 1.0))
    mixed = tl.log(tl.where(low < 0.5, low, mix)) + lost
    # exp overflows above 88
    return tl.where(y > 80.0, y + tl.log(weight), mixed)


@triton.jit
def exact(x, beta, rest, k2, k3, k4, k5, k6, k7, ENDS: tl.constexpr, HARDWARE: tl.constexpr):
    """For x: log(p/m), log(q/m), whether x is near 0, and then the term over p."""
    # NaN, where both sides are masked, compares false
    x = tl.where(tl.abs(x) < _FAR, x, tl.where(x > 0.0, _FAR, -_FAR))
    near = tl.abs(x) < _NEAR
    t = tl.where(near, x, 0.0)
    big_g = t * (k2 + t * (k3 + t * (k4 + t * (k5 + t * (k6 + t * k7)))))
    big_e = 1.0 / 24.0 + t * (1.0 / 120.0 + t * (1.0 / 720.0))
    big_e = t * (1.0 + t * (0.5 + t * (1.0 / 6.0 + t * big_e)))
    if ENDS:
        log_p = -_log_mix(x, beta, rest)
        log_q = -_log_mix(-x, rest, beta)
    else:
        _, _, log_mix, far = quick(x * LOG2E, beta, rest, HARDWARE)
        q_larger = x > 0.0
        log_small = (log_mix + far) * -LN2
        log_large = log_mix * -LN2
        log_p = tl.where(q_larger, log_small, log_large)
        log_q = tl.where(q_larger, log_large, log_small)
    log_p = tl.where(near, -beta * t * (1.0 + rest * big_g), log_p)
    log_q = tl.where(near, rest * t * (1.0 - beta * big_g), log_q)
    return log_p, log_q, near, beta * rest * t * (big_e - big_g * (1.0 + beta * big_e))
