"""The device side of `kl`'s gradients: what a program does with some blocks of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.kl_kernels import clipped, finite_unless_masked, probabilities
from vocabtp.kernels._triton.loads import load_at, load_block, ragged, store_block
from vocabtp.kernels._triton.online import INF
from vocabtp.kernels._triton.pair import two_gradients, upstream_of


@triton.jit
def _grads(
    a, b, skip, m_a, m_b, inv_a, inv_b, mean, kept, ratio, scale, c, inv_t, clip,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Gradients to both sides; without CLIP `mean` is W / S_a."""
    grad_a = tl.zeros_like(a)
    grad_b = tl.zeros_like(b)
    if not skip:
        p_a, p_b, d = probabilities(a, b, m_a, m_b, inv_a, inv_b, c, inv_t)
        if CLIP:
            _, below, log_ab = clipped(p_a, finite_unless_masked(d, b), ratio, clip)
            grad_a = (tl.where(below, log_ab + 1.0, 0.0) - mean) * p_a * scale
            grad_b = (p_b * kept - tl.where(below, p_a, 0.0)) * scale
        else:
            # a token without probability has no d; with an infinite KL even 0 times it is not
            # finite
            grad_a = (tl.where(p_a == 0.0, 0.0, d) - mean) * p_a * scale
            grad_b = (p_b - p_a) * scale
    return grad_a, grad_b


@triton.jit(do_not_specialize=["rows", "blocks", "inner_a", "inner_b", "grad_stride"])
def kl_grad_kernel(
    a_ptr, b_ptr, out_a_ptr, out_b_ptr, max_ptr, sum_ptr, flag_ptr, terms_ptr, grad_ptr, rows,
    cols, blocks, grad_stride, inner_a, outer_stride_a, inner_stride_a, inner_b, outer_stride_b,
    inner_stride_b, c, inv_t, clip, factor,
    GRAD_A: tl.constexpr, GRAD_B: tl.constexpr, CLIP: tl.constexpr, SHIFT: tl.constexpr,
    LEAD_B: tl.constexpr, WIDE_A: tl.constexpr, WIDE_B: tl.constexpr, WIDE_OUT_A: tl.constexpr,
    WIDE_OUT_B: tl.constexpr, WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * (BLOCKS * BLOCK)
    a_ptr, b_ptr, out_a_ptr, out_b_ptr, phase = two_gradients(
        a_ptr, b_ptr, out_a_ptr, out_b_ptr, row, cols, inner_a, outer_stride_a, inner_stride_a,
        inner_b, outer_stride_b, inner_stride_b, SHIFT, LEAD_B, WIDE_A, WIDE_B, WIDE_OUT_A,
        WIDE_OUT_B, WORDS,
    )  # fmt: skip
    limit = cols + phase
    # before all else: nothing waits for anything then
    a = load_block(a_ptr, start, limit, phase, BLOCK, SHIFT, WIDE_A)
    b = load_block(b_ptr, start, limit, phase, BLOCK, SHIFT, WIDE_B)
    m_a, m_b = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_a, s_b = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    scale, skip = upstream_of(grad_ptr, grad_stride, row, factor, s_a, s_b)
    inv_a, inv_b = 1.0 / s_a, 1.0 / s_b
    kept = 0.0
    ratio = 0.0
    if CLIP:
        mean, kept = tl.load(terms_ptr + rows + row), tl.load(terms_ptr + 2 * rows + row)
        ratio = tl.log(s_b / s_a)
    else:
        mean = tl.load(sum_ptr + 2 * rows + row) / s_a
        mean = tl.where(tl.load(flag_ptr + row) != 0.0, INF, mean)
    for i in tl.static_range(BLOCKS):
        first = start + i * BLOCK
        if i + 1 < BLOCKS:
            next_a = load_block(a_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT, WIDE_A)
            next_b = load_block(b_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT, WIDE_B)
        grad_a, grad_b = _grads(
            a, b, skip, m_a, m_b, inv_a, inv_b, mean, kept, ratio, scale, c, inv_t, clip, CLIP
        )
        if GRAD_A:
            store_block(out_a_ptr, first, limit, phase, grad_a, BLOCK, SHIFT)
        if GRAD_B:
            store_block(out_b_ptr, first, limit, phase, grad_b, BLOCK, SHIFT)
        if i + 1 < BLOCKS:
            a, b = next_a, next_b
    if SHIFT and start == 0:
        at, mine = ragged(phase, limit)
        ragged_a = load_at(a_ptr, at, mine)
        ragged_b = load_at(b_ptr, at, mine)
        ragged_a, ragged_b = _grads(
            ragged_a, ragged_b, skip, m_a, m_b, inv_a, inv_b, mean, kept, ratio, scale, c, inv_t,
            clip, CLIP,
        )  # fmt: skip
        if GRAD_A:
            tl.store(out_a_ptr + at, ragged_a, mask=mine)
        if GRAD_B:
            tl.store(out_b_ptr + at, ragged_b, mask=mine)
