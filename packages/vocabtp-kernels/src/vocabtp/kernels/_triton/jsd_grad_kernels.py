"""The device side of `jsd`'s gradients: what a program does with some blocks of two rows."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.jsd_kernels import SMALL, exact_terms
from vocabtp.kernels._triton.loads import load_at, load_block, ragged, store_block
from vocabtp.kernels._triton.mixture import LN2, LOG2E, quick
from vocabtp.kernels._triton.pair import two_gradients, upstream_of


@triton.jit
def _quick_grads(
    p, q, m_p, m_q, mean_p2, mean_q2, k_p, k_q, ratio2, beta, rest, c, HARDWARE: tl.constexpr
):  # fmt: skip
    """Gradients to both sides from means to base 2 and the factors of exp(u)."""
    u_p, u_q = p - m_p, q - m_q
    x2 = (u_q - u_p) * c - ratio2
    _, _, log_mix, far = quick(x2, beta, rest, HARDWARE)
    # minus the logarithms: a minus sign costs an instruction
    log_p = log_mix + tl.where(x2 > 0.0, far, 0.0)
    log_q = log_mix + tl.where(x2 > 0.0, 0.0, far)
    grad_p = (tl.exp2(u_p * c) * k_p) * (log_p + mean_p2)
    grad_q = (tl.exp2(u_q * c) * k_q) * (log_q + mean_q2)
    return grad_p, grad_q


@triton.jit
def _grads(
    p, q, skip, usual, m_p, m_q, s_p, s_q, mean_p, mean_q, factor_p, factor_q, c, inv_t, clip,
    beta, rest, k2, k3, k4, k5, k6, k7,
    ENDS: tl.constexpr, CLIP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Gradients to both sides; `usual` for rows whose value the quick way is good enough for."""
    grad_p = tl.zeros_like(p)
    grad_q = tl.zeros_like(q)
    if not skip:
        if usual:
            grad_p, grad_q = _quick_grads(
                p, q, m_p, m_q, mean_p * LOG2E, mean_q * LOG2E, factor_p * -LN2 / s_p,
                factor_q * -LN2 / s_q, tl.log2(s_q / s_p), beta, rest, c, HARDWARE,
            )  # fmt: skip
        else:
            _, prob_p, prob_q, log_p, log_q = exact_terms(
                p, q, m_p, m_q, 1.0 / s_p, 1.0 / s_q, tl.log(s_q / s_p), beta, rest, c, inv_t,
                clip, k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
            )  # fmt: skip
            grad_p = prob_p * (log_p - mean_p) * factor_p
            grad_q = prob_q * (log_q - mean_q) * factor_q
    return grad_p, grad_q


@triton.jit(do_not_specialize=["rows", "blocks", "inner_p", "inner_q", "grad_stride"])
def jsd_grad_kernel(
    p_ptr, q_ptr, out_p_ptr, out_q_ptr, max_ptr, sum_ptr, terms_ptr, grad_ptr, rows, cols, blocks,
    grad_stride, inner_p, outer_stride_p, inner_stride_p, inner_q, outer_stride_q, inner_stride_q,
    c, inv_t, clip, beta, rest, k2, k3, k4, k5, k6, k7, factor,
    GRAD_P: tl.constexpr, GRAD_Q: tl.constexpr, ENDS: tl.constexpr, CLIP: tl.constexpr,
    HARDWARE: tl.constexpr, SHIFT: tl.constexpr, LEAD_B: tl.constexpr, WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr, WIDE_OUT_A: tl.constexpr, WIDE_OUT_B: tl.constexpr,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * (BLOCKS * BLOCK)
    p_ptr, q_ptr, out_p_ptr, out_q_ptr, phase = two_gradients(
        p_ptr, q_ptr, out_p_ptr, out_q_ptr, row, cols, inner_p, outer_stride_p, inner_stride_p,
        inner_q, outer_stride_q, inner_stride_q, SHIFT, LEAD_B, WIDE_A, WIDE_B, WIDE_OUT_A,
        WIDE_OUT_B, WORDS,
    )  # fmt: skip
    limit = cols + phase
    # before all else: nothing waits for anything then
    p = load_block(p_ptr, start, limit, phase, BLOCK, SHIFT, WIDE_A)
    q = load_block(q_ptr, start, limit, phase, BLOCK, SHIFT, WIDE_B)
    m_p, m_q = tl.load(max_ptr + row), tl.load(max_ptr + rows + row)
    s_p, s_q = tl.load(sum_ptr + row), tl.load(sum_ptr + rows + row)
    mean_p, mean_q = tl.load(terms_ptr + rows + row), tl.load(terms_ptr + 2 * rows + row)
    scale, skip = upstream_of(grad_ptr, grad_stride, row, factor, s_p, s_q)
    # rows whose value the quick way is good enough for
    if ENDS or CLIP:
        usual = False
    else:
        usual = tl.load(terms_ptr + row) > SMALL
    for i in tl.static_range(BLOCKS):
        first = start + i * BLOCK
        if i + 1 < BLOCKS:
            next_p = load_block(p_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT, WIDE_A)
            next_q = load_block(q_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT, WIDE_B)
        grad_p, grad_q = _grads(
            p, q, skip, usual, m_p, m_q, s_p, s_q, mean_p, mean_q, scale * rest, scale * beta,
            c, inv_t, clip, beta, rest, k2, k3, k4, k5, k6, k7, ENDS, CLIP, HARDWARE,
        )  # fmt: skip
        if GRAD_P:
            store_block(out_p_ptr, first, limit, phase, grad_p, BLOCK, SHIFT)
        if GRAD_Q:
            store_block(out_q_ptr, first, limit, phase, grad_q, BLOCK, SHIFT)
        if i + 1 < BLOCKS:
            p, q = next_p, next_q
    if SHIFT and start == 0:
        at, mine = ragged(phase, limit)
        ragged_p = load_at(p_ptr, at, mine)
        ragged_q = load_at(q_ptr, at, mine)
        ragged_p, ragged_q = _grads(
            ragged_p, ragged_q, skip, usual, m_p, m_q, s_p, s_q, mean_p, mean_q, scale * rest,
            scale * beta, c, inv_t, clip, beta, rest, k2, k3, k4, k5, k6, k7,
            ENDS, CLIP, HARDWARE,
        )  # fmt: skip
        if GRAD_P:
            tl.store(out_p_ptr + at, ragged_p, mask=mine)
        if GRAD_Q:
            tl.store(out_q_ptr + at, ragged_q, mask=mine)
