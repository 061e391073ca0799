"""Helpers on the device for kernels that read two rows side by side."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.loads import back, phase_of, row_offset


@triton.jit
def two_rows(
    a_ptr, b_ptr, row, inner_a, outer_stride_a, inner_stride_a, inner_b, outer_stride_b,
    inner_stride_b, SHIFT: tl.constexpr, LEAD_B: tl.constexpr, WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
):  # fmt: skip
    """Both sides of a row from `phase` columns before it, the phase being that of the leader."""
    a_ptr += row_offset(row, inner_a, outer_stride_a, inner_stride_a)
    b_ptr += row_offset(row, inner_b, outer_stride_b, inner_stride_b)
    phase = phase_of(b_ptr if LEAD_B else a_ptr, SHIFT)
    return back(a_ptr, phase, WIDE_A, False), back(b_ptr, phase, WIDE_B, False), phase


@triton.jit
def two_gradients(
    a_ptr, b_ptr, out_a_ptr, out_b_ptr, row, cols, inner_a, outer_stride_a, inner_stride_a,
    inner_b, outer_stride_b, inner_stride_b, SHIFT: tl.constexpr, LEAD_B: tl.constexpr,
    WIDE_A: tl.constexpr, WIDE_B: tl.constexpr, WIDE_OUT_A: tl.constexpr,
    WIDE_OUT_B: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Both sides of a row and of its gradients, the phase being that of the leading gradient."""
    a_ptr += row_offset(row, inner_a, outer_stride_a, inner_stride_a)
    b_ptr += row_offset(row, inner_b, outer_stride_b, inner_stride_b)
    out_a_ptr += row.to(tl.int64) * cols
    out_b_ptr += row.to(tl.int64) * cols
    phase = phase_of(out_b_ptr if LEAD_B else out_a_ptr, SHIFT)
    a_ptr, b_ptr = back(a_ptr, phase, WIDE_A, WORDS), back(b_ptr, phase, WIDE_B, WORDS)
    out_a_ptr = back(out_a_ptr, phase, WIDE_OUT_A, WORDS)
    out_b_ptr = back(out_b_ptr, phase, WIDE_OUT_B, WORDS)
    return a_ptr, b_ptr, out_a_ptr, out_b_ptr, phase


@triton.jit
def upstream_of(grad_ptr, grad_stride, row, factor, s_a, s_b):
    """Upstream times `factor`, NaN in a row with a NaN, and whether the row's gradient is 0."""
    grad = tl.load(grad_ptr + row.to(tl.int64) * grad_stride)
    poisoned = (s_a != s_a) | (s_b != s_b)
    scale = tl.where(poisoned, float("nan"), grad * factor)
    return scale, (grad == 0.0) | (s_a == 0.0) | (s_b == 0.0)
