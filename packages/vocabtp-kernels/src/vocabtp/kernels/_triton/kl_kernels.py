"""The device side of `kl`: what a program does with one segment or block of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.online import (
    INF,
    LOWEST,
    fold,
    load,
    load4,
    moved,
    moved_weighted,
    raise_max,
    row_offset,
    seen_max,
)


@triton.jit
def _add(sum_a, sum_b, weighted, a, b, m_a, m_b, c, WEIGHTED: tl.constexpr):
    u_a, u_b = a - m_a, b - m_b
    e = tl.exp2(u_a * c)
    if WEIGHTED:
        # where A is masked d is -inf, or NaN with B masked too, and has to become finite; where B
        # alone is masked it is +inf, and W is inf or, where e underflows, NaN: decided on the
        # logits, not the probabilities
        d = u_a - u_b
        weighted += e * tl.where(d > LOWEST, d, LOWEST)
    return sum_a + e, sum_b + tl.exp2(u_b * c), weighted


@triton.jit
def _step(
    m_a, m_b, sum_a, sum_b, weighted, a_ptr, b_ptr, cols, limit, c,
    W: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    a0, a1, a2, a3 = load4(a_ptr, cols, limit, T, M)
    b0, b1, b2, b3 = load4(b_ptr, cols, limit, T, M)
    m_a, shift_a, weight_a = raise_max(m_a, a0, a1, a2, a3, c)
    m_b, shift_b, weight_b = raise_max(m_b, b0, b1, b2, b3, c)
    if W:
        weighted = (weighted + (shift_a - shift_b) * sum_a) * weight_a
    sum_a *= weight_a
    sum_b *= weight_b
    sum_a, sum_b, weighted = _add(sum_a, sum_b, weighted, a0, b0, m_a, m_b, c, W)
    sum_a, sum_b, weighted = _add(sum_a, sum_b, weighted, a1, b1, m_a, m_b, c, W)
    sum_a, sum_b, weighted = _add(sum_a, sum_b, weighted, a2, b2, m_a, m_b, c, W)
    sum_a, sum_b, weighted = _add(sum_a, sum_b, weighted, a3, b3, m_a, m_b, c, W)
    return m_a, m_b, sum_a, sum_b, weighted


@triton.jit(do_not_specialize=["rows", "n_seg", "inner_a", "inner_b"])
def pair_stats_kernel(
    a_ptr,
    b_ptr,
    part_ptr,
    rows,
    cols,
    n_seg,
    seg_cols,
    inner_a,
    outer_stride_a,
    inner_stride_a,
    inner_b,
    outer_stride_b,
    inner_stride_b,
    c,
    inv_t,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Maxima and sums of two sides; with WEIGHTED also W and the flag of KL."""
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    a_ptr += row_offset(row, inner_a, outer_stride_a, inner_stride_a)
    b_ptr += row_offset(row, inner_b, outer_stride_b, inner_stride_b)
    lanes = tl.arange(0, TILE)
    start = seg * seg_cols
    steps = (tl.minimum(start + seg_cols, cols) - start) // (4 * TILE)
    m_a = tl.full([TILE], LOWEST, tl.float32)
    m_b = tl.full([TILE], LOWEST, tl.float32)
    sum_a = tl.zeros([TILE], tl.float32)
    sum_b = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for i in range(steps):
        at = start + i * (4 * TILE) + lanes
        m_a, m_b, sum_a, sum_b, weighted = _step(
            m_a, m_b, sum_a, sum_b, weighted, a_ptr, b_ptr, at, cols, c, WEIGHTED, TILE, False
        )
    tail = start + steps * (4 * TILE)
    if tail < tl.minimum(start + seg_cols, cols):
        at = tail + lanes
        m_a, m_b, sum_a, sum_b, weighted = _step(
            m_a, m_b, sum_a, sum_b, weighted, a_ptr, b_ptr, at, cols, c, WEIGHTED, TILE, True
        )
    top_a, top_b = tl.max(m_a, 0), tl.max(m_b, 0)
    shift_a = tl.maximum(m_a - top_a, LOWEST)
    shift_b = tl.maximum(m_b - top_b, LOWEST)
    all_a = fold(moved(sum_a, shift_a, c), TILE)
    all_b = fold(moved(sum_b, shift_b, c), TILE)
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, seen_max(top_a, all_a))
    tl.store(out + plane, seen_max(top_b, all_b))
    tl.store(out + 2 * plane, all_a)
    tl.store(out + 3 * plane, all_b)
    if WEIGHTED:
        moved_w = moved_weighted(weighted, sum_a, shift_a, shift_b, c, 1.0)
        tl.store(out + 4 * plane, fold(moved_w, TILE) * inv_t)
        # a slot far below the maximum loses its sums, not this
        outside = tl.where(tl.abs(weighted) < INF, 0.0, 1.0)
        tl.store(out + 5 * plane, tl.max(outside, 0))


@triton.jit
def _sides(a, b, m_a, m_b, inv_a, inv_b, c, inv_t):
    """a, b and d, which is 0 where A has no probability."""
    u_a, u_b = a - m_a, b - m_b
    p_a = tl.exp2(u_a * c) * inv_a
    p_b = tl.exp2(u_b * c) * inv_b
    return p_a, p_b, (u_a - u_b) * inv_t


@triton.jit
def _clipped(p_a, d, ratio, clip):
    """Terms up to the cap, whether they are below it, and log(a / b), 0 where it is infinite."""
    outside = d == INF
    # inf - inf and NaN compare false
    log_ab = tl.where(tl.abs(d) < INF, d + ratio, 0.0)
    term = tl.where(outside, INF, p_a * log_ab)
    below = term <= clip
    return tl.where(below, term, tl.where(term == term, clip, term)), below, log_ab


@triton.jit
def _add_terms(
    sum_t, sum_f, sum_w, a_ptr, b_ptr, cols, limit, m_a, m_b, inv_a, inv_b, ratio, c, inv_t, clip,
    MASKED: tl.constexpr,
):  # fmt: skip
    a = load(a_ptr, cols, limit, MASKED)
    b = load(b_ptr, cols, limit, MASKED)
    p_a, _, d = _sides(a, b, m_a, m_b, inv_a, inv_b, c, inv_t)
    term, below, log_ab = _clipped(p_a, d, ratio, clip)
    live = tl.where(below, p_a, 0.0)
    return sum_t + term, sum_f + live * (log_ab + 1.0), sum_w + live


@triton.jit(do_not_specialize=["rows", "n_seg", "inner_a", "inner_b"])
def kl_terms_kernel(
    a_ptr,
    b_ptr,
    max_ptr,
    sum_ptr,
    part_ptr,
    rows,
    cols,
    n_seg,
    seg_cols,
    inner_a,
    outer_stride_a,
    inner_stride_a,
    inner_b,
    outer_stride_b,
    inner_stride_b,
    c,
    inv_t,
    clip,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    a_ptr += row_offset(row, inner_a, outer_stride_a, inner_stride_a)
    b_ptr += row_offset(row, inner_b, outer_stride_b, inner_stride_b)
    m_a, m_b = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_a, s_b = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    ratio = tl.log(s_b / s_a)
    start = seg * seg_cols
    end = tl.minimum(start + seg_cols, cols)
    sum_t = tl.zeros([TILE], tl.float32)
    sum_f = tl.zeros([TILE], tl.float32)
    sum_w = tl.zeros([TILE], tl.float32)
    whole = start + (end - start) // TILE * TILE
    for first in range(start, whole, TILE):
        sum_t, sum_f, sum_w = _add_terms(
            sum_t, sum_f, sum_w, a_ptr, b_ptr, first + tl.arange(0, TILE), cols,
            m_a, m_b, 1.0 / s_a, 1.0 / s_b, ratio, c, inv_t, clip, False,
        )  # fmt: skip
    if whole < end:
        sum_t, sum_f, sum_w = _add_terms(
            sum_t, sum_f, sum_w, a_ptr, b_ptr, whole + tl.arange(0, TILE), cols,
            m_a, m_b, 1.0 / s_a, 1.0 / s_b, ratio, c, inv_t, clip, True,
        )  # fmt: skip
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, fold(sum_t, TILE))
    tl.store(out + plane, fold(sum_f, TILE))
    tl.store(out + 2 * plane, fold(sum_w, TILE))


@triton.jit(do_not_specialize=["rows", "blocks", "inner_a", "inner_b"])
def kl_grad_kernel(
    a_ptr,
    b_ptr,
    out_a_ptr,
    out_b_ptr,
    max_ptr,
    sum_ptr,
    flag_ptr,
    terms_ptr,
    scale_ptr,
    skip_ptr,
    rows,
    cols,
    blocks,
    inner_a,
    outer_stride_a,
    inner_stride_a,
    inner_b,
    outer_stride_b,
    inner_stride_b,
    c,
    inv_t,
    clip,
    GRAD_A: tl.constexpr,
    GRAD_B: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    # before all else: nothing waits for anything then
    a = load(a_ptr + row_offset(row, inner_a, outer_stride_a, inner_stride_a), at, cols, True)
    b = load(b_ptr + row_offset(row, inner_b, outer_stride_b, inner_stride_b), at, cols, True)
    m_a, m_b = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_a, s_b = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    scale = tl.load(scale_ptr + row)
    grad_a = tl.zeros([BLOCK], tl.float32)
    grad_b = tl.zeros([BLOCK], tl.float32)
    if tl.load(skip_ptr + row) == 0:
        p_a, p_b, d = _sides(a, b, m_a, m_b, 1.0 / s_a, 1.0 / s_b, c, inv_t)
        if CLIP:
            mean, kept = tl.load(terms_ptr + rows + row), tl.load(terms_ptr + 2 * rows + row)
            _, below, log_ab = _clipped(p_a, d, tl.log(s_b / s_a), clip)
            grad_a = (tl.where(below, log_ab + 1.0, 0.0) - mean) * p_a * scale
            grad_b = (p_b * kept - tl.where(below, p_a, 0.0)) * scale
        else:
            centre = tl.load(sum_ptr + 2 * rows + row) / s_a
            centre = tl.where(tl.load(flag_ptr + row) != 0.0, INF, centre)
            # a token without probability has no d; with an infinite KL even 0 times it is not
            # finite
            grad_a = (tl.where(p_a == 0.0, 0.0, d) - centre) * p_a * scale
            grad_b = (p_b - p_a) * scale
    if GRAD_A:
        tl.store(out_a_ptr + row.to(tl.int64) * cols + at, grad_a, mask=at < cols)
    if GRAD_B:
        tl.store(out_b_ptr + row.to(tl.int64) * cols + at, grad_b, mask=at < cols)
