"""The device side of `jsd`: what a program does with one segment of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.loads import (
    load,
    load_at,
    tile_within,
)
from vocabtp.kernels._triton.mixture import LN2, add_by_sign, exact, quick
from vocabtp.kernels._triton.online import fold
from vocabtp.kernels._triton.pair import two_rows

# below this value of JSD over the probability covered the quick way is not good enough
SMALL = tl.constexpr(1e-3)


@triton.jit
def _add_quick(
    sum_p, sum_q, mass, p, q, m_p, m_q, log_s_p, log_s_q, beta, rest, c, HARDWARE: tl.constexpr
):  # fmt: skip
    """Minus p log2(p/m) and q log2(q/m), and m: a minus sign costs an instruction."""
    log_p = (p - m_p) * c - log_s_p
    log_q = (q - m_q) * c - log_s_q
    x2 = log_q - log_p
    r, mix, log_mix, far = quick(x2, beta, rest, HARDWARE)
    large = tl.exp2(tl.maximum(log_p, log_q))
    sum_p, sum_q = add_by_sign(sum_p, sum_q, x2, large * r, log_mix + far, large, log_mix, HARDWARE)
    return sum_p, sum_q, mass + large * mix


@triton.jit
def exact_terms(
    p, q, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip, k2, k3, k4, k5, k6, k7,
    ENDS: tl.constexpr, CLIP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The term, and p, q, w log(p/m), w log(q/m); w is 0 where the term is at the cap."""
    u_p, u_q = p - m_p, q - m_q
    prob_p = tl.exp2(u_p * c) * inv_p
    prob_q = tl.exp2(u_q * c) * inv_q
    x = (u_q - u_p) * inv_t - ratio
    log_p, log_q, near, of_p = exact(x, beta, rest, k2, k3, k4, k5, k6, k7, ENDS, HARDWARE)
    term = beta * (prob_q * log_q) + rest * (prob_p * log_p)
    term = tl.where(near, prob_p * of_p, term)
    if CLIP:
        above = term > clip
        log_p = tl.where(above, 0.0, log_p)
        log_q = tl.where(above, 0.0, log_q)
        term = tl.where(above, clip, term)
    return term, prob_p, prob_q, log_p, log_q


@triton.jit
def _quick_sums(
    p_ptr, q_ptr, start, stop, cols, phase, m_p, m_q, s_p, s_q, beta, rest, c,
    HARDWARE: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of p log(p/m), q log(q/m) and m over a segment, by the quick way."""
    limit = cols + phase
    stop += phase
    log_s_p, log_s_q = tl.log2(s_p), tl.log2(s_q)
    sum_p = tl.zeros([TILE], tl.float32)
    sum_q = tl.zeros([TILE], tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    begin = start
    if SHIFT:
        begin += TILE
        p = tile_within(p_ptr, start, start + phase, stop, phase, limit, TILE)
        q = tile_within(q_ptr, start, start + phase, stop, phase, limit, TILE)
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p, q, m_p, m_q, log_s_p, log_s_q, beta, rest, c, HARDWARE
        )
    whole = begin + tl.maximum(stop - begin, 0) // (2 * TILE) * (2 * TILE)
    for first in tl.range(begin, whole, 2 * TILE, num_stages=STAGES):
        at = first + tl.arange(0, TILE)
        p0, q0 = load(p_ptr, at), load(q_ptr, at)
        p1, q1 = load(p_ptr, at + TILE), load(q_ptr, at + TILE)
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p0, q0, m_p, m_q, log_s_p, log_s_q, beta, rest, c, HARDWARE
        )
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p1, q1, m_p, m_q, log_s_p, log_s_q, beta, rest, c, HARDWARE
        )
    for first in range(whole, stop, TILE):
        p = tile_within(p_ptr, first, first, stop, phase, limit, TILE)
        q = tile_within(q_ptr, first, first, stop, phase, limit, TILE)
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p, q, m_p, m_q, log_s_p, log_s_q, beta, rest, c, HARDWARE
        )
    sum_p = fold(sum_p, phase, TILE, SHIFT) * -LN2
    sum_q = fold(sum_q, phase, TILE, SHIFT) * -LN2
    return sum_p, sum_q, fold(mass, phase, TILE, SHIFT)


@triton.jit
def _exact_sums(
    p_ptr, q_ptr, start, stop, limit, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip,
    k2, k3, k4, k5, k6, k7,
    ENDS: tl.constexpr, CLIP: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of the terms, of w p log(p/m) and of w q log(q/m) over a segment, by the exact way.

    Every tile is masked, and none is shifted: the rows that come here are bound by arithmetic.
    """
    sum_t = tl.zeros([TILE], tl.float32)
    sum_p = tl.zeros([TILE], tl.float32)
    sum_q = tl.zeros([TILE], tl.float32)
    for first in range(start, stop, TILE):
        at = first + tl.arange(0, TILE)
        p = load_at(p_ptr, at, at < limit)
        q = load_at(q_ptr, at, at < limit)
        term, prob_p, prob_q, log_p, log_q = exact_terms(
            p, q, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip,
            k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
        )  # fmt: skip
        sum_t += term
        sum_p += prob_p * log_p
        sum_q += prob_q * log_q
    return fold(sum_t, 0, TILE, False), fold(sum_p, 0, TILE, False), fold(sum_q, 0, TILE, False)


@triton.jit(do_not_specialize=["rows", "n_seg", "inner_p", "inner_q"])
def jsd_terms_kernel(
    p_ptr,
    q_ptr,
    max_ptr,
    sum_ptr,
    part_ptr,
    rows,
    cols,
    n_seg,
    seg_cols,
    inner_p,
    outer_stride_p,
    inner_stride_p,
    inner_q,
    outer_stride_q,
    inner_stride_q,
    c,
    inv_t,
    clip,
    beta,
    rest,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    ENDS: tl.constexpr,
    CLIP: tl.constexpr,
    HARDWARE: tl.constexpr,
    SHIFT: tl.constexpr,
    LEAD_B: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
    EXACT_TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    p_ptr, q_ptr, phase = two_rows(
        p_ptr, q_ptr, row, inner_p, outer_stride_p, inner_stride_p,
        inner_q, outer_stride_q, inner_stride_q, SHIFT, LEAD_B, WIDE_A, WIDE_B,
    )  # fmt: skip
    m_p, m_q = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_p, s_q = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    start = seg * seg_cols
    stop = tl.minimum(start + seg_cols, cols)
    sum_t = 0.0
    sum_p = 0.0
    sum_q = 0.0
    mass = 1.0
    if not (ENDS or CLIP):
        sum_p, sum_q, mass = _quick_sums(
            p_ptr, q_ptr, start, stop, cols, phase, m_p, m_q, s_p, s_q, beta, rest, c,
            HARDWARE, SHIFT, STAGES, TILE,
        )  # fmt: skip
        sum_t = beta * sum_q + rest * sum_p
    # a NaN stays what it is
    if sum_t <= mass * SMALL:
        sum_t, sum_p, sum_q = _exact_sums(
            p_ptr + phase, q_ptr + phase, start, stop, cols, m_p, m_q, 1.0 / s_p, 1.0 / s_q,
            tl.log(s_q / s_p), beta, rest, c, inv_t, clip, k2, k3, k4, k5, k6, k7,
            ENDS, CLIP, HARDWARE, EXACT_TILE,
        )  # fmt: skip
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, sum_t)
    tl.store(out + plane, sum_p)
    tl.store(out + 2 * plane, sum_q)
