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
    return back(a_ptr, phase, WIDE_A), back(b_ptr, phase, WIDE_B), phase


@triton.jit
def upstream_of(grad_ptr, grad_stride, row, factor, s_a, s_b):
    """Upstream times `factor`, NaN in a row with a NaN, and whether the row's gradient is 0."""
    grad = tl.load(grad_ptr + row.to(tl.int64) * grad_stride)
    poisoned = (s_a != s_a) | (s_b != s_b)
    scale = tl.where(poisoned, float("nan"), grad * factor)
    return scale, (grad == 0.0) | (s_a == 0.0) | (s_b == 0.0)
