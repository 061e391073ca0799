"""The device side of `tokens`: what a program does with one segment or block of a row."""

import triton
import triton.language as tl

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


@triton.jit(do_not_specialize=["inner", "ids"])
def chosen_kernel(
    x_ptr, column_ptr, out_ptr, ids, inner, stride_outer, stride_inner, BLOCK: tl.constexpr
):
    """The logits at a row's columns, 0 where a column is < 0."""
    row = tl.program_id(0)
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    for first in range(0, ids, BLOCK):
        k = first + tl.arange(0, BLOCK)
        at = row.to(tl.int64) * ids + k
        column = tl.load(column_ptr + at, mask=k < ids, other=-1)
        x = tl.load(x_ptr + column, mask=column >= 0, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, x, mask=k < ids)


@triton.jit
def _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY: tl.constexpr):
    """-p (w_h (log p + H) + sum of the ids' weights)."""
    delta = x - m
    e = tl.exp2(delta * c)
    if ENTROPY:
        total += weight * (tl.where(e == 0.0, 0.0, delta * inv_t) - centre)
    return -(e * inv_s) * total


@triton.jit(do_not_specialize=["rows", "inner", "blocks", "ids"])
def token_grad_kernel(
    x_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    skip_ptr,
    column_ptr,
    weight_ptr,
    total_ptr,
    entropy_ptr,
    rows,
    cols,
    blocks,
    ids,
    inner,
    stride_outer,
    stride_inner,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    ONE_ID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    # before all else: nothing waits for anything then
    x = load(x_ptr + row_offset(row, inner, stride_outer, stride_inner), at, cols, True)
    m, s, total = tl.load(max_ptr + row), tl.load(sum_ptr + row), tl.load(total_ptr + row)
    centre = 0.0
    weight = 0.0
    if ENTROPY:
        centre = tl.load(sum_ptr + rows + row) / s
        weight = tl.load(entropy_ptr + row)
    grad = tl.zeros([BLOCK], tl.float32)
    if tl.load(skip_ptr + row) == 0:
        grad = _grad_of_p(x, m, 1.0 / s, centre, weight, total, c, inv_t, ENTROPY)
        if ONE_ID:
            chosen = at == tl.load(column_ptr + row).to(tl.int32)
            grad = tl.where(chosen, grad + tl.load(weight_ptr + row), grad)
    tl.store(out_ptr + row.to(tl.int64) * cols + at, grad, mask=at < cols)


@triton.jit(do_not_specialize=["rows", "inner", "ids"])
def chosen_grad_kernel(
    x_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    skip_ptr,
    column_ptr,
    weight_ptr,
    total_ptr,
    entropy_ptr,
    rows,
    cols,
    ids,
    inner,
    stride_outer,
    stride_inner,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient at a row's columns once more, with all their weights added before the cast.

    Every id that names a column writes the same bits there: the weights are added in the ids'
    order.
    """
    row = tl.program_id(0)
    if tl.load(skip_ptr + row) == 0:
        x_ptr += row_offset(row, inner, stride_outer, stride_inner)
        m, s = tl.load(max_ptr + row), tl.load(sum_ptr + row)
        total = tl.load(total_ptr + row)
        centre = 0.0
        weight = 0.0
        if ENTROPY:
            centre = tl.load(sum_ptr + rows + row) / s
            weight = tl.load(entropy_ptr + row)
        first = row.to(tl.int64) * ids
        for start in range(0, ids, BLOCK):
            k = start + tl.arange(0, BLOCK)
            mine = tl.load(column_ptr + first + k, mask=k < ids, other=-1)
            x = tl.load(x_ptr + mine, mask=mine >= 0, other=0.0).to(tl.float32)
            grad = _grad_of_p(x, m, 1.0 / s, centre, weight, total, c, inv_t, ENTROPY)
            for j in range(ids):
                other = tl.load(column_ptr + first + j)
                grad = tl.where(mine == other, grad + tl.load(weight_ptr + first + j), grad)
            tl.store(out_ptr + row.to(tl.int64) * cols + mine, grad, mask=mine >= 0)


@triton.jit(do_not_specialize=["rows", "ids"])
def total_kernel(weight_ptr, out_ptr, rows, ids, BLOCK: tl.constexpr):
    """The sum of a row's weights, in the ids' order."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(ids):
        total += tl.load(weight_ptr + row.to(tl.int64) * ids + k, mask=row < rows, other=0.0)
    tl.store(out_ptr + row, total, mask=row < rows)
