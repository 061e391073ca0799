"""The device side of `jsd`: what a program does with one segment or block of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.mixture import exact, quick
from vocabtp.kernels._triton.online import fold, load, row_offset

_LN2 = tl.constexpr(0.6931471805599453)
# below this value of JSD over the probability covered the quick way is not good enough
_SMALL = tl.constexpr(1e-3)


@triton.jit
def _add_quick(
    sum_p, sum_q, mass, p_ptr, q_ptr, cols, limit, m_p, m_q, inv_p, inv_q, ratio2, beta, rest, c,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    u_p = load(p_ptr, cols, limit, MASKED) - m_p
    u_q = load(q_ptr, cols, limit, MASKED) - m_q
    x2 = (u_q - u_p) * c - ratio2
    q_larger, r, mix, log_large, far = quick(x2, beta, rest, HARDWARE)
    large = tl.exp2(tl.where(q_larger, u_q, u_p) * c) * tl.where(q_larger, inv_q, inv_p)
    t_large = large * log_large
    t_small = (large * r) * (log_large - far)
    sum_p += tl.where(q_larger, t_small, t_large)
    sum_q += tl.where(q_larger, t_large, t_small)
    return sum_p, sum_q, mass + large * mix


@triton.jit
def _exact_terms(
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
def _add_exact(
    sum_t, sum_p, sum_q, p_ptr, q_ptr, cols, limit, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c,
    inv_t, clip, k2, k3, k4, k5, k6, k7,
    ENDS: tl.constexpr, CLIP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    p = load(p_ptr, cols, limit, True)
    q = load(q_ptr, cols, limit, True)
    term, prob_p, prob_q, log_p, log_q = _exact_terms(
        p, q, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip,
        k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
    )  # fmt: skip
    return sum_t + term, sum_p + prob_p * log_p, sum_q + prob_q * log_q


@triton.jit
def _quick_sums(
    p_ptr, q_ptr, start, end, m_p, m_q, inv_p, inv_q, ratio2, beta, rest, c,
    HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of p log(p/m), q log(q/m) and m over a segment, by the quick way."""
    sum_p = tl.zeros([TILE], tl.float32)
    sum_q = tl.zeros([TILE], tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    whole = start + (end - start) // TILE * TILE
    for first in range(start, whole, TILE):
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p_ptr, q_ptr, first + tl.arange(0, TILE), end,
            m_p, m_q, inv_p, inv_q, ratio2, beta, rest, c, HARDWARE, False,
        )  # fmt: skip
    if whole < end:
        sum_p, sum_q, mass = _add_quick(
            sum_p, sum_q, mass, p_ptr, q_ptr, whole + tl.arange(0, TILE), end,
            m_p, m_q, inv_p, inv_q, ratio2, beta, rest, c, HARDWARE, True,
        )  # fmt: skip
    return fold(sum_p, TILE) * _LN2, fold(sum_q, TILE) * _LN2, fold(mass, TILE)


@triton.jit
def _exact_sums(
    p_ptr, q_ptr, start, end, m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip,
    k2, k3, k4, k5, k6, k7,
    ENDS: tl.constexpr, CLIP: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of the terms, of w p log(p/m) and of w q log(q/m) over a segment, by the exact way."""
    sum_t = tl.zeros([TILE], tl.float32)
    sum_p = tl.zeros([TILE], tl.float32)
    sum_q = tl.zeros([TILE], tl.float32)
    # every tile is masked: the rows that come here are bound by arithmetic
    for first in range(start, end, TILE):
        sum_t, sum_p, sum_q = _add_exact(
            sum_t, sum_p, sum_q, p_ptr, q_ptr, first + tl.arange(0, TILE), end,
            m_p, m_q, inv_p, inv_q, ratio, beta, rest, c, inv_t, clip,
            k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
        )  # fmt: skip
    return fold(sum_t, TILE), fold(sum_p, TILE), fold(sum_q, TILE)


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
    TILE: tl.constexpr,
    EXACT_TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    p_ptr += row_offset(row, inner_p, outer_stride_p, inner_stride_p)
    q_ptr += row_offset(row, inner_q, outer_stride_q, inner_stride_q)
    m_p, m_q = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_p, s_q = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    start = seg * seg_cols
    end = tl.minimum(start + seg_cols, cols)
    sum_t = 0.0
    sum_p = 0.0
    sum_q = 0.0
    mass = 1.0
    if not (ENDS or CLIP):
        sum_p, sum_q, mass = _quick_sums(
            p_ptr, q_ptr, start, end, m_p, m_q, 1.0 / s_p, 1.0 / s_q, tl.log2(s_q / s_p),
            beta, rest, c, HARDWARE, TILE,
        )  # fmt: skip
        sum_t = beta * sum_q + rest * sum_p
    # a NaN stays what it is
    if sum_t <= mass * _SMALL:
        sum_t, sum_p, sum_q = _exact_sums(
            p_ptr, q_ptr, start, end, m_p, m_q, 1.0 / s_p, 1.0 / s_q, tl.log(s_q / s_p),
            beta, rest, c, inv_t, clip, k2, k3, k4, k5, k6, k7,
            ENDS, CLIP, HARDWARE, EXACT_TILE,
        )  # fmt: skip
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, sum_t)
    tl.store(out + plane, sum_p)
    tl.store(out + 2 * plane, sum_q)


@triton.jit
def _quick_logs(p, q, m_p, m_q, inv_p, inv_q, ratio2, beta, rest, c, HARDWARE: tl.constexpr):
    u_p, u_q = p - m_p, q - m_q
    x2 = (u_q - u_p) * c - ratio2
    q_larger, _, _, log_large, far = quick(x2, beta, rest, HARDWARE)
    log_small = (log_large - far) * _LN2
    log_large *= _LN2
    log_p = tl.where(q_larger, log_small, log_large)
    log_q = tl.where(q_larger, log_large, log_small)
    return tl.exp2(u_p * c) * inv_p, tl.exp2(u_q * c) * inv_q, log_p, log_q


@triton.jit(do_not_specialize=["rows", "blocks", "inner_p", "inner_q"])
def jsd_grad_kernel(
    p_ptr,
    q_ptr,
    out_p_ptr,
    out_q_ptr,
    max_ptr,
    sum_ptr,
    terms_ptr,
    scale_ptr,
    skip_ptr,
    rows,
    cols,
    blocks,
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
    GRAD_P: tl.constexpr,
    GRAD_Q: tl.constexpr,
    ENDS: tl.constexpr,
    CLIP: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    # before all else: nothing waits for anything then
    p = load(p_ptr + row_offset(row, inner_p, outer_stride_p, inner_stride_p), at, cols, True)
    q = load(q_ptr + row_offset(row, inner_q, outer_stride_q, inner_stride_q), at, cols, True)
    m_p, m_q = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_p, s_q = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    mean_p, mean_q = tl.load(terms_ptr + rows + row), tl.load(terms_ptr + 2 * rows + row)
    scale = tl.load(scale_ptr + row)
    grad_p = tl.zeros([BLOCK], tl.float32)
    grad_q = tl.zeros([BLOCK], tl.float32)
    if tl.load(skip_ptr + row) == 0:
        # rows whose value the quick way is good enough for
        if ENDS or CLIP:
            usual = False
        else:
            usual = tl.load(terms_ptr + row) > _SMALL
        if usual:
            prob_p, prob_q, log_p, log_q = _quick_logs(
                p, q, m_p, m_q, 1.0 / s_p, 1.0 / s_q, tl.log2(s_q / s_p), beta, rest, c, HARDWARE
            )
        else:
            _, prob_p, prob_q, log_p, log_q = _exact_terms(
                p, q, m_p, m_q, 1.0 / s_p, 1.0 / s_q, tl.log(s_q / s_p), beta, rest, c, inv_t,
                clip, k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
            )  # fmt: skip
        grad_p = prob_p * (log_p - mean_p) * (scale * rest)
        grad_q = prob_q * (log_q - mean_q) * (scale * beta)
    if GRAD_P:
        tl.store(out_p_ptr + row.to(tl.int64) * cols + at, grad_p, mask=at < cols)
    if GRAD_Q:
        tl.store(out_q_ptr + row.to(tl.int64) * cols + at, grad_q, mask=at < cols)
