"""The device side of `merge`: parts of rows - segments, or ranks - put together in their order."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.online import (
    INF,
    LOWEST,
    finite_max,
    moved,
    moved_weighted,
    seen_max,
)


@triton.jit
def _nan_unless_defined(value, s_a, s_b):
    defined = (s_a == s_a) & (s_b == s_b) & (s_a != 0.0) & (s_b != 0.0)
    return tl.where(defined, value, float("nan"))


@triton.jit
def _tops(max_ptr, row, live, parts, part_stride, plane_stride, SIDES: tl.constexpr):
    """The maxima of all parts, of one side or of two."""
    top_a = tl.zeros_like(row).to(tl.float32) + LOWEST
    top_b = top_a
    for part in range(parts):
        at = max_ptr + part * part_stride + row
        top_a = tl.maximum(top_a, tl.load(at, mask=live, other=0.0))
        if SIDES == 2:
            top_b = tl.maximum(top_b, tl.load(at + plane_stride, mask=live, other=0.0))
    return top_a, top_b


@triton.jit
def _shift(at, live, top):
    part_top = finite_max(tl.load(at, mask=live, other=0.0))
    return tl.maximum(part_top - top, LOWEST)


@triton.jit(do_not_specialize=["rows", "parts", "part_stride", "plane_stride"])
def merge_kernel(
    max_ptr,
    sum_ptr,
    flag_ptr,
    out_ptr,
    value_ptr,
    rows,
    parts,
    part_stride,
    plane_stride,
    c,
    inv_t,
    SIDES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maxes, sums, with WEIGHTED a weighted sum, of two sides then also flags; VALUE is the KL."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = row < rows
    part_stride = part_stride.to(tl.int64)
    plane_stride = plane_stride.to(tl.int64)
    top_a, top_b = _tops(max_ptr, row, live, parts, part_stride, plane_stride, SIDES)
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    flag = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        offset = part * part_stride + row
        shift_a = _shift(max_ptr + offset, live, top_a)
        shift_b = tl.zeros([BLOCK], tl.float32)
        total = tl.load(sum_ptr + offset, mask=live, other=0.0)
        sum_a += moved(total, shift_a, c)
        if SIDES == 2:
            shift_b = _shift(max_ptr + plane_stride + offset, live, top_b)
            other = tl.load(sum_ptr + plane_stride + offset, mask=live, other=0.0)
            sum_b += moved(other, shift_b, c)
        if WEIGHTED:
            w = tl.load(sum_ptr + SIDES * plane_stride + offset, mask=live, other=0.0)
            weighted += moved_weighted(w, total, shift_a, shift_b, c, inv_t)
        if WEIGHTED and SIDES == 2:
            flag = tl.maximum(flag, tl.load(flag_ptr + offset, mask=live, other=0.0))
    tl.store(out_ptr + row, seen_max(top_a, sum_a), mask=live)
    if SIDES == 2:
        tl.store(out_ptr + rows + row, seen_max(top_b, sum_b), mask=live)
        tl.store(out_ptr + 3 * rows.to(tl.int64) + row, sum_b, mask=live)
    tl.store(out_ptr + SIDES * rows.to(tl.int64) + row, sum_a, mask=live)
    if WEIGHTED:
        tl.store(out_ptr + 2 * SIDES * rows.to(tl.int64) + row, weighted, mask=live)
    if WEIGHTED and SIDES == 2:
        tl.store(out_ptr + 5 * rows.to(tl.int64) + row, flag, mask=live)
    if VALUE:
        value = weighted / sum_a + tl.log(sum_b / sum_a)
        value = _nan_unless_defined(tl.where(flag != 0.0, INF, value), sum_a, sum_b)
        tl.store(value_ptr + row, value, mask=live)


@triton.jit(do_not_specialize=["rows", "parts", "part_stride", "plane_stride"])
def add_kernel(
    part_ptr,
    sum_ptr,
    out_ptr,
    value_ptr,
    rows,
    parts,
    part_stride,
    plane_stride,
    scale,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Three planes added; VALUE is the first times `scale`, NaN where a side does not exist."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = row < rows
    for plane in tl.static_range(3):
        total = tl.zeros([BLOCK], tl.float32)
        for part in range(parts):
            offset = part * part_stride.to(tl.int64) + plane * plane_stride.to(tl.int64) + row
            total += tl.load(part_ptr + offset, mask=live, other=0.0)
        tl.store(out_ptr + plane * rows.to(tl.int64) + row, total, mask=live)
        if VALUE and plane == 0:
            s_a = tl.load(sum_ptr + row, mask=live, other=1.0)
            s_b = tl.load(sum_ptr + rows + row, mask=live, other=1.0)
            tl.store(value_ptr + row, _nan_unless_defined(total * scale, s_a, s_b), mask=live)
