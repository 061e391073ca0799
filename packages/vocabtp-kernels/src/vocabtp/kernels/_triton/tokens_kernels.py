"""The device side of `tokens`: what a program does with one segment or block of a row."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.ids_kernels import BAD, IGNORED
from vocabtp.kernels._triton.online import (
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
def _add(total, weighted, x, m, c, ENTROPY: tl.constexpr):
    delta = x - m
    e = tl.exp2(delta * c)
    if ENTROPY:
        # finite at a masked token, where e is 0
        weighted += e * tl.where(delta > LOWEST, delta, LOWEST)
    return total + e, weighted


@triton.jit
def _step(
    m, total, weighted, ptr, cols, limit, c, E: tl.constexpr, T: tl.constexpr, M: tl.constexpr
):
    x0, x1, x2, x3 = load4(ptr, cols, limit, T, M)
    m, shift, weight = raise_max(m, x0, x1, x2, x3, c)
    if E:
        weighted = (weighted + shift * total) * weight
    total *= weight
    total, weighted = _add(total, weighted, x0, m, c, E)
    total, weighted = _add(total, weighted, x1, m, c, E)
    total, weighted = _add(total, weighted, x2, m, c, E)
    total, weighted = _add(total, weighted, x3, m, c, E)
    return m, total, weighted


@triton.jit(do_not_specialize=["rows", "n_seg", "inner"])
def token_stats_kernel(
    x_ptr,
    part_ptr,
    rows,
    cols,
    n_seg,
    seg_cols,
    inner,
    stride_outer,
    stride_inner,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    lanes = tl.arange(0, TILE)
    start = seg * seg_cols
    steps = (tl.minimum(start + seg_cols, cols) - start) // (4 * TILE)
    m = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    for i in range(steps):
        at = start + i * (4 * TILE) + lanes
        m, total, weighted = _step(m, total, weighted, x_ptr, at, cols, c, ENTROPY, TILE, False)
    tail = start + steps * (4 * TILE)
    if tail < tl.minimum(start + seg_cols, cols):
        at = tail + lanes
        m, total, weighted = _step(m, total, weighted, x_ptr, at, cols, c, ENTROPY, TILE, True)
    top = tl.max(m, 0)
    shift = tl.maximum(m - top, LOWEST)
    sum_ = fold(moved(total, shift, c), TILE)
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, seen_max(top, sum_))
    tl.store(out + plane, sum_)
    if ENTROPY:
        sum_ = fold(moved_weighted(weighted, total, shift, 0.0, c, 1.0), TILE)
        tl.store(out + 2 * plane, sum_ * inv_t)


@triton.jit
def _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY: tl.constexpr):
    """-p (w_h (log p + H) + sum of the ids' weights)."""
    delta = x - m
    e = tl.exp2(delta * c)
    if ENTROPY:
        total += weight * (tl.where(e == 0.0, 0.0, delta * inv_t) - centre)
    return -(e * inv_s) * total


@triton.jit
def _upstream(
    row, s, column_ptr, grad_ptr, grad_row, entropy_ptr, entropy_row, inv_t, rows,
    ENTROPY: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Upstream gradients over T: of the entropy, of all ids, and whether the gradient is 0."""
    idle = row >= 0
    weight = 0.0
    total = 0.0
    if ENTROPY:
        grad = tl.load(entropy_ptr + row.to(tl.int64) * entropy_row)
        weight = grad * inv_t
        idle = grad == 0.0
    if IDS == 1:
        column = tl.load(column_ptr + row)
        grad = tl.load(grad_ptr + row.to(tl.int64) * grad_row)
        grad = tl.where(column == IGNORED, 0.0, grad)
        total = tl.where((column == BAD) & (grad != 0.0), float("nan"), grad * inv_t)
        idle = idle & (grad == 0.0)
    elif IDS == 2:
        total = tl.load(grad_ptr + row)
        idle = idle & (tl.load(grad_ptr + rows + row) == 0.0)
    return weight, total, idle | (s == 0.0)


@triton.jit(do_not_specialize=["rows", "inner", "blocks", "ids", "grad_row", "entropy_row"])
def token_grad_kernel(
    x_ptr,
    out_ptr,
    stats_ptr,
    column_ptr,
    grad_ptr,
    weight_ptr,
    entropy_ptr,
    rows,
    cols,
    blocks,
    ids,
    inner,
    stride_outer,
    stride_inner,
    grad_row,
    entropy_row,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """`IDS` is 0, 1, or 2 for many: then `weights_kernel` has been, and `grad_ptr` its sums."""
    row = tl.program_id(0) // blocks
    begin = (tl.program_id(0) % blocks) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    # before all else: nothing waits for anything then
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    x = load(x_ptr, at, cols, True)
    m, s = tl.load(stats_ptr + row), tl.load(stats_ptr + rows + row)
    weight, total, skip = _upstream(
        row, s, column_ptr, grad_ptr, grad_row, entropy_ptr, entropy_row, inv_t, rows, ENTROPY, IDS
    )
    centre = 0.0
    if ENTROPY:
        centre = tl.load(stats_ptr + 2 * rows.to(tl.int64) + row) / s
    out_ptr += row.to(tl.int64) * cols
    grad = tl.zeros([BLOCK], tl.float32)
    if not skip:
        grad = _grad_of_p(x, m, 1.0 / s, centre, weight, total, c, inv_t, ENTROPY)
        if IDS == 1:
            grad = tl.where(at == tl.load(column_ptr + row), grad + total, grad)
    tl.store(out_ptr + at, grad, mask=at < cols)
    if IDS == 2:  # noqa: SIM102 - one is the compiler's, the other the device's
        if not skip:
            # while the block is near: its columns with ids once more
            tl.debug_barrier()
            first = row.to(tl.int64) * ids
            column_ptr += first
            weight_ptr += first
            for start in range(0, ids, SOME):
                k = start + tl.arange(0, SOME)
                column = tl.load(column_ptr + k, mask=k < ids, other=-1)
                mine = (column >= begin) & (column < begin + BLOCK)
                near = tl.load(x_ptr + column, mask=mine, other=0.0).to(tl.float32)
                own = _grad_of_p(near, m, 1.0 / s, centre, weight, total, c, inv_t, ENTROPY)
                own += tl.load(weight_ptr + k, mask=mine, other=0.0)
                tl.store(out_ptr + column, own, mask=mine)
