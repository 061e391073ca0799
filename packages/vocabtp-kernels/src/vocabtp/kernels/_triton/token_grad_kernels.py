"""The device side of `tokens`, backward: blocks of a row, and its columns with ids."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.ids_kernels import column_of
from vocabtp.kernels._triton.loads import (
    back,
    in_whole,
    load_at,
    load_block,
    phase_of,
    ragged,
    row_offset,
    store_block,
)


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
    row, s, stats_ptr, id_, grad_ptr, sum_ptr, entropy_ptr, entropy_row, ignore, inv_t, rows,
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
        bad = tl.load(stats_ptr + 2 * rows.to(tl.int64) + row)
        grad = tl.load(grad_ptr)
        grad = tl.where(id_ == ignore, 0.0, grad)
        total = tl.where((bad != 0.0) & (grad != 0.0), float("nan"), grad * inv_t)
        idle = idle & (grad == 0.0)
    elif IDS == 2:
        total = tl.load(sum_ptr + row)
        idle = idle & (tl.load(sum_ptr + rows + row) == 0.0)
    return weight, total, idle | (s == 0.0)


@triton.jit
def _grad(
    x, at, column, skip, m, inv_s, centre, weight, total, c, inv_t,
    ENTROPY: tl.constexpr, ONE_ID: tl.constexpr,
):  # fmt: skip
    grad = tl.zeros_like(x)
    if not skip:
        grad = _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY)
        if ONE_ID:
            grad = tl.where(at == column, grad + total, grad)
    return grad


@triton.jit
def _write_all(
    x, x_ptr, out_ptr, column, start, limit, phase, skip, m, inv_s, centre, weight, total, c, inv_t,
    ENTROPY: tl.constexpr, ONE_ID: tl.constexpr, SHIFT: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The program's columns, with the one id's; `x` is the first block of them."""
    for i in tl.static_range(BLOCKS):
        first = start + i * BLOCK
        if i + 1 < BLOCKS:
            next_x = load_block(x_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT)
        grad = _grad(
            x, first + tl.arange(0, BLOCK), column, skip, m, inv_s, centre, weight, total, c, inv_t,
            ENTROPY, ONE_ID,
        )  # fmt: skip
        store_block(out_ptr, first, limit, phase, grad, BLOCK, SHIFT, False)
        if i + 1 < BLOCKS:
            x = next_x
    if SHIFT and start == 0:
        at, mine = ragged(phase, limit)
        ragged_grad = _grad(
            load_at(x_ptr, at, mine), at, column, skip, m, inv_s, centre, weight, total, c, inv_t,
            ENTROPY, ONE_ID,
        )  # fmt: skip
        tl.store(out_ptr + at, ragged_grad, mask=mine)


@triton.jit
def _weight_of(
    column, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols,
    SOME: tl.constexpr,
):  # fmt: skip
    """What all of a row's ids of one column weigh."""
    total = tl.zeros([SOME], tl.float32)
    for some in range(0, ids, SOME):
        k = some + tl.arange(0, SOME)
        id_ = tl.load(id_ptr + k.to(tl.int64) * id_step, mask=k < ids, other=0)
        same = (k < ids) & (column_of(id_, ignore, vocab_start, cols) == column)
        total += tl.load(grad_ptr + k.to(tl.int64) * grad_step, mask=same, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _write_ids(
    x_ptr, out_ptr, id_ptr, grad_ptr, repeat_ptr, ids, id_step, grad_step, ignore, vocab_start,
    cols, start, width, limit, phase, m, inv_s, centre, weight, total, c, inv_t,
    ENTROPY: tl.constexpr, DENSE: tl.constexpr, SHIFT: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The program's columns with ids once more, while they are near."""
    if DENSE:
        # after all of the program's stores
        tl.debug_barrier()
    for some in range(0, ids, SOME):
        k = some + tl.arange(0, SOME)
        id_ = tl.load(id_ptr + k.to(tl.int64) * id_step, mask=k < ids, other=0)
        column = tl.where(k < ids, column_of(id_, ignore, vocab_start, cols), -1)
        at = column + phase
        mine = (at >= start) & (at < start + width)
        if SHIFT:
            whole = in_whole(at, phase, limit, SHIFT)
            mine = (mine & whole) | ((start == 0) & (whole == 0))
        mine = mine & (column >= 0)
        x = tl.load(x_ptr + at, mask=mine, other=0.0).to(tl.float32)
        added = tl.load(grad_ptr + k.to(tl.int64) * grad_step, mask=mine, other=0.0)
        word = tl.load(repeat_ptr + k // 32, mask=mine, other=0)
        # one after the other, what the ids of a column weigh that has more than one
        left = tl.where(((word >> (k % 32)) & 1) != 0, column, cols)
        first = tl.min(left, 0)
        while first < cols:
            sum_ = _weight_of(
                first, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols, SOME
            )
            added = tl.where(column == first, sum_, added)
            left = tl.where(column == first, cols, left)
            first = tl.min(left, 0)
        own = _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY)
        tl.store(out_ptr + at, own + added * inv_t, mask=mine)


@triton.jit(
    do_not_specialize=[
        "rows",
        "blocks",
        "ids",
        "words",
        "inner",
        "id_blocks",
        "id_outer",
        "id_inner",
        "id_step",
        "ignore",
        "vocab_start",
        "grad_row",
        "grad_step",
        "entropy_row",
    ]
)
def token_grad_kernel(
    x_ptr,
    out_ptr,
    stats_ptr,
    id_ptr,
    grad_ptr,
    sum_ptr,
    repeat_ptr,
    entropy_ptr,
    rows,
    cols,
    blocks,
    ids,
    words,
    inner,
    stride_outer,
    stride_inner,
    id_blocks,
    id_outer,
    id_inner,
    id_step,
    ignore,
    vocab_start,
    grad_row,
    grad_step,
    entropy_row,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    IDS: tl.constexpr,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_OUT_A: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """`IDS` is 0, 1, or 2 for many: then `sums_kernel` has been.

    DENSE writes each column, LAST the columns of many ids once more.
    """
    row = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * (BLOCKS * BLOCK)
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    phase = phase_of(x_ptr, SHIFT)
    x_ptr = back(x_ptr, phase, WIDE_A)
    out_ptr = back(out_ptr + row.to(tl.int64) * cols, phase, WIDE_OUT_A)
    limit = cols + phase
    # before all else: nothing waits for anything then
    if DENSE:
        x = load_block(x_ptr, start, limit, phase, BLOCK, SHIFT)
    m, s = tl.load(stats_ptr + row), tl.load(stats_ptr + rows + row)
    if IDS:
        id_ptr += row_offset(row, id_blocks, id_outer, id_inner)
        grad_ptr += row.to(tl.int64) * grad_row
    column, id_ = -1, ignore
    if IDS == 1:
        id_ = tl.load(id_ptr).to(tl.int64)
        column = column_of(id_, ignore, vocab_start, cols)
        column = tl.where(column < 0, -1, column + phase)
    weight, total, skip = _upstream(
        row, s, stats_ptr, id_, grad_ptr, sum_ptr, entropy_ptr, entropy_row, ignore, inv_t, rows,
        ENTROPY, IDS,
    )  # fmt: skip
    inv_s = 1.0 / s
    centre = 0.0
    if ENTROPY:
        centre = tl.load(stats_ptr + 3 * rows.to(tl.int64) + row) / s
    if DENSE:
        _write_all(
            x, x_ptr, out_ptr, column, start, limit, phase, skip, m, inv_s, centre, weight, total,
            c, inv_t, ENTROPY, IDS == 1, SHIFT, BLOCKS, BLOCK,
        )  # fmt: skip
    if IDS == 2 and LAST:  # noqa: SIM102 - one is the compiler's, the other the device's
        if not skip:
            _write_ids(
                x_ptr, out_ptr, id_ptr, grad_ptr, repeat_ptr + row.to(tl.int64) * words, ids,
                id_step, grad_step, ignore, vocab_start, cols, start, BLOCKS * BLOCK, limit, phase,
                m, inv_s, centre, weight, total, c, inv_t, ENTROPY, DENSE, SHIFT, SOME,
            )  # fmt: skip
