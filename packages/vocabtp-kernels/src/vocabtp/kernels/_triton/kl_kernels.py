"""The device side of `kl`: what a program does with one segment of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.loads import (
    first_tile,
    lanes_of,
    load,
    masked4,
    next4,
    tile_within,
    whole_tiles,
)
from vocabtp.kernels._triton.online import (
    INF,
    LOWEST,
    fold,
    moved,
    moved_weighted,
    raise_max,
    seen_max,
)
from vocabtp.kernels._triton.pair import two_rows


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
    m_a, m_b, sum_a, sum_b, weighted, a0, a1, a2, a3, b0, b1, b2, b3, c, W: tl.constexpr
):  # fmt: skip
    m_a, shift_a, weight_a = raise_max(m_a, a0, a1, a2, a3, c)
    m_b, shift_b, weight_b = raise_max(m_b, b0, b1, b2, b3, c)
    sum_a *= weight_a
    sum_b *= weight_b
    if W:
        # the sum moved first: a shift of B may be as large as a number can be
        weighted = weighted * weight_a + (shift_a - shift_b) * sum_a
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
    SHIFT: tl.constexpr,
    LEAD_B: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Maxima and sums of two sides; with WEIGHTED also W and the flag of KL."""
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    a_ptr, b_ptr, phase = two_rows(
        a_ptr, b_ptr, row, inner_a, outer_stride_a, inner_stride_a,
        inner_b, outer_stride_b, inner_stride_b, SHIFT, LEAD_B, WIDE_A, WIDE_B,
    )  # fmt: skip
    start = seg * seg_cols
    stop = tl.minimum(start + seg_cols, cols)
    limit = cols + phase
    lanes, ahead = lanes_of(phase, TILE)
    m_a = tl.full([TILE], LOWEST, tl.float32)
    m_b = tl.full([TILE], LOWEST, tl.float32)
    sum_a = tl.zeros([TILE], tl.float32)
    sum_b = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    last_a = first_tile(a_ptr, start, phase, limit, TILE, SHIFT)
    last_b = first_tile(b_ptr, start, phase, limit, TILE, SHIFT)
    masked = start + whole_tiles(start, stop, cols, phase, 4, TILE, SHIFT) * (4 * TILE)
    for first in tl.range(start, masked, 4 * TILE, num_stages=STAGES):
        at = first + tl.arange(0, TILE)
        a0, a1, a2, a3, last_a = next4(a_ptr, at, last_a, ahead, TILE, SHIFT)
        b0, b1, b2, b3, last_b = next4(b_ptr, at, last_b, ahead, TILE, SHIFT)
        m_a, m_b, sum_a, sum_b, weighted = _step(
            m_a, m_b, sum_a, sum_b, weighted, a0, a1, a2, a3, b0, b1, b2, b3, c, WEIGHTED
        )
    for first in range(masked, stop, 4 * TILE):
        a0, a1, a2, a3 = masked4(a_ptr, first + lanes, limit, TILE)
        b0, b1, b2, b3 = masked4(b_ptr, first + lanes, limit, TILE)
        m_a, m_b, sum_a, sum_b, weighted = _step(
            m_a, m_b, sum_a, sum_b, weighted, a0, a1, a2, a3, b0, b1, b2, b3, c, WEIGHTED
        )
    top_a, top_b = tl.max(m_a, 0), tl.max(m_b, 0)
    shift_a = tl.maximum(m_a - top_a, LOWEST)
    shift_b = tl.maximum(m_b - top_b, LOWEST)
    all_a = fold(moved(sum_a, shift_a, c), phase, TILE, SHIFT)
    all_b = fold(moved(sum_b, shift_b, c), phase, TILE, SHIFT)
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, seen_max(top_a, all_a))
    tl.store(out + plane, seen_max(top_b, all_b))
    tl.store(out + 2 * plane, all_a)
    tl.store(out + 3 * plane, all_b)
    if WEIGHTED:
        moved_w = moved_weighted(weighted, sum_a, shift_a, shift_b, c, 1.0)
        tl.store(out + 4 * plane, fold(moved_w, phase, TILE, SHIFT) * inv_t)
        # a slot far below the maximum loses its sums, not this
        outside = tl.where(tl.abs(weighted) < INF, 0.0, 1.0)
        tl.store(out + 5 * plane, tl.max(outside, 0))


@triton.jit
def probabilities(a, b, m_a, m_b, inv_a, inv_b, c, inv_t):
    """a, b and d, which is 0 where A has no probability."""
    u_a, u_b = a - m_a, b - m_b
    p_a = tl.exp2(u_a * c) * inv_a
    p_b = tl.exp2(u_b * c) * inv_b
    return p_a, p_b, (u_a - u_b) * inv_t


@triton.jit
def finite_unless_masked(d, b):
    """A d that overflows, of a low number of b and a low temperature, is no mask."""
    return tl.where((d == INF) & (b > -INF), -LOWEST, d)


@triton.jit
def clipped(p_a, d, ratio, clip):
    """Terms up to the cap, whether they are below it, and log(a / b), 0 where it is infinite."""
    outside = d == INF
    # inf - inf and NaN compare false
    log_ab = tl.where(tl.abs(d) < INF, d + ratio, 0.0)
    term = tl.where(outside, INF, p_a * log_ab)
    below = term <= clip
    return tl.where(below, term, tl.where(term == term, clip, term)), below, log_ab


@triton.jit
def _add_terms(sum_t, sum_f, sum_w, a, b, m_a, m_b, inv_a, inv_b, ratio, c, inv_t, clip):
    p_a, _, d = probabilities(a, b, m_a, m_b, inv_a, inv_b, c, inv_t)
    d = finite_unless_masked(d, b)
    term, below, log_ab = clipped(p_a, d, ratio, clip)
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
    SHIFT: tl.constexpr,
    LEAD_B: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    a_ptr, b_ptr, phase = two_rows(
        a_ptr, b_ptr, row, inner_a, outer_stride_a, inner_stride_a,
        inner_b, outer_stride_b, inner_stride_b, SHIFT, LEAD_B, WIDE_A, WIDE_B,
    )  # fmt: skip
    m_a, m_b = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_a, s_b = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    ratio = tl.log(s_b / s_a)
    start = seg * seg_cols
    stop = tl.minimum(start + seg_cols, cols) + phase
    limit = cols + phase
    sum_t = tl.zeros([TILE], tl.float32)
    sum_f = tl.zeros([TILE], tl.float32)
    sum_w = tl.zeros([TILE], tl.float32)
    begin = start
    if SHIFT:
        begin += TILE
        a = tile_within(a_ptr, start, start + phase, stop, phase, limit, TILE)
        b = tile_within(b_ptr, start, start + phase, stop, phase, limit, TILE)
        sum_t, sum_f, sum_w = _add_terms(
            sum_t, sum_f, sum_w, a, b, m_a, m_b, 1.0 / s_a, 1.0 / s_b, ratio, c, inv_t, clip
        )
    whole = begin + tl.maximum(stop - begin, 0) // TILE * TILE
    for first in tl.range(begin, whole, TILE, num_stages=STAGES):
        a = load(a_ptr, first + tl.arange(0, TILE))
        b = load(b_ptr, first + tl.arange(0, TILE))
        sum_t, sum_f, sum_w = _add_terms(
            sum_t, sum_f, sum_w, a, b, m_a, m_b, 1.0 / s_a, 1.0 / s_b, ratio, c, inv_t, clip
        )
    if whole < stop:
        a = tile_within(a_ptr, whole, whole, stop, phase, limit, TILE)
        b = tile_within(b_ptr, whole, whole, stop, phase, limit, TILE)
        sum_t, sum_f, sum_w = _add_terms(
            sum_t, sum_f, sum_w, a, b, m_a, m_b, 1.0 / s_a, 1.0 / s_b, ratio, c, inv_t, clip
        )
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, fold(sum_t, phase, TILE, SHIFT))
    tl.store(out + plane, fold(sum_f, phase, TILE, SHIFT))
    tl.store(out + 2 * plane, fold(sum_w, phase, TILE, SHIFT))
