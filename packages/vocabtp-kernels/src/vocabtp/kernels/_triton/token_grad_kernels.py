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
def _some_ids(
    some, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols, SOME: tl.constexpr
):
    """`SOME` of a row's ids from `some` on: their columns, -1 for none here, and gradients."""
    k = some + tl.arange(0, SOME)
    id_ = tl.load(id_ptr + k.to(tl.int64) * id_step, mask=k < ids, other=0)
    grad = tl.load(grad_ptr + k.to(tl.int64) * grad_step, mask=k < ids, other=0.0)
    grad = tl.where(id_.to(tl.int64) == ignore, 0.0, grad)
    column = column_of(id_, ignore, vocab_start, cols)
    return tl.where(k < ids, column, -1), grad


@triton.jit
def _weights(
    grad, id_ptr, grad_ptr, bad, ids, id_step, grad_step, ignore, vocab_start, cols,
    SOME: tl.constexpr,
):  # fmt: skip
    """What a row's ids weigh together, and whether one asks; `grad` is the first ones'."""
    # a bad id anywhere on the row is a NaN there, wherever a gradient is not 0
    poison = tl.where(bad != 0.0, float("nan"), 0.0)
    total = tl.where(grad != 0.0, grad + poison, 0.0)
    asked = (grad != 0.0).to(tl.int32)
    for some in range(SOME, ids, SOME):
        _, grad = _some_ids(
            some, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols, SOME
        )
        asked = tl.where(grad != 0.0, 1, asked)
        total += tl.where(grad != 0.0, grad + poison, 0.0)
    return tl.sum(total, 0), tl.max(asked, 0)


@triton.jit
def _upstream(
    row, s, stats_ptr, id_, grads, id_ptr, grad_ptr, entropy_ptr, entropy_row, ids, id_step,
    grad_step, ignore, vocab_start, rows, cols, inv_t,
    ENTROPY: tl.constexpr, IDS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Upstream gradients over T: of the entropy, of all ids, and whether the gradient is 0."""
    idle = row >= 0
    weight = 0.0
    total = 0.0
    if ENTROPY:
        grad = tl.load(entropy_ptr + row.to(tl.int64) * entropy_row)
        weight = grad * inv_t
        idle = grad == 0.0
    if IDS:
        bad = tl.load(stats_ptr + 2 * rows.to(tl.int64) + row)
    if IDS == 1:
        grad = tl.load(grad_ptr)
        grad = tl.where(id_ == ignore, 0.0, grad)
        total = tl.where((bad != 0.0) & (grad != 0.0), float("nan"), grad * inv_t)
        idle = idle & (grad == 0.0)
    elif IDS == 2:
        total, asked = _weights(
            grads, id_ptr, grad_ptr, bad, ids, id_step, grad_step, ignore, vocab_start, cols, SOME
        )
        total *= inv_t
        idle = idle & (asked == 0)
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
    ENTROPY: tl.constexpr, ONE_ID: tl.constexpr, SHIFT: tl.constexpr, WIDE_A: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program's columns, with the one id's; `x` is the first block of them."""
    for i in tl.static_range(BLOCKS):
        first = start + i * BLOCK
        if i + 1 < BLOCKS:
            next_x = load_block(x_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT, WIDE_A)
        grad = _grad(
            x, first + tl.arange(0, BLOCK), column, skip, m, inv_s, centre, weight, total, c, inv_t,
            ENTROPY, ONE_ID,
        )  # fmt: skip
        store_block(out_ptr, first, limit, phase, grad, BLOCK, SHIFT)
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
def _not_alone(out_ptr, at, mine, CLAIM: tl.constexpr, LAST: tl.constexpr, SOME: tl.constexpr):
    """Which of a row's ids, if `SOME` are all, share their column with another one.

    To CLAIM, each writes its number where the program's gradient is. In the LAST launch, the same
    one or another, each reads who was last there.
    """
    if out_ptr.dtype.element_ty.primitive_bitwidth == 16:
        cell_ptr = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        cell_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    number = tl.arange(0, SOME).to(cell_ptr.dtype.element_ty)
    last = number
    if CLAIM:
        tl.store(cell_ptr + at, number, mask=mine)
    if LAST:
        tl.debug_barrier()
        last = tl.load(cell_ptr + at, mask=mine, other=0)
        # all have read before one writes its gradient
        tl.debug_barrier()
    return mine & (last != number)


@triton.jit
def _write_ids(
    column, grad, x_ptr, out_ptr, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start,
    cols, start, width, limit, phase, m, inv_s, centre, weight, total, c, inv_t,
    ENTROPY: tl.constexpr, DENSE: tl.constexpr, CLAIM: tl.constexpr, LAST: tl.constexpr,
    SHIFT: tl.constexpr, ALL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The program's columns with ids once more; `column` and `grad` are the first ones'."""
    if DENSE:
        # behind all that the program has stored
        tl.debug_barrier()
    for some in range(0, ids, SOME):
        if not ALL:
            column, grad = _some_ids(
                some, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols, SOME
            )
        at = column + phase
        mine = (at >= start) & (at < start + width)
        if SHIFT:
            whole = in_whole(at, phase, limit, SHIFT)
            mine = (mine & whole) | ((start == 0) & (whole == 0))
        mine = mine & (column >= 0)
        x = tl.load(x_ptr + at, mask=mine, other=0.0).to(tl.float32)
        shared = mine
        if ALL:
            shared = _not_alone(out_ptr, at, mine, CLAIM, LAST, SOME)
        if LAST:
            # one after the other, what the ids of a column weigh that has more than one; the
            # minimum is of all lanes, none of which stores before all have read
            left = tl.where(shared, column, cols)
            first = tl.min(left, 0)
            while first < cols:
                if ALL:
                    sum_ = tl.sum(tl.where(column == first, grad, 0.0), 0)
                else:
                    sum_ = _weight_of(
                        first, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols,
                        SOME,
                    )  # fmt: skip
                grad = tl.where(column == first, sum_, grad)
                left = tl.where(column == first, cols, left)
                first = tl.min(left, 0)
            own = _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY)
            tl.store(out_ptr + at, own + grad * inv_t, mask=mine)


@triton.jit(
    do_not_specialize=[
        "rows",
        "blocks",
        "ids",
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
    entropy_ptr,
    rows,
    cols,
    blocks,
    ids,
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
    CLAIM: tl.constexpr,
    LAST: tl.constexpr,
    ALL: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE_A: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """`IDS` is 0, 1, or 2 for many; DENSE writes all columns, CLAIM and LAST see to many ids'."""
    row, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * (BLOCKS * BLOCK)
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    out_ptr += row.to(tl.int64) * cols
    phase = phase_of(out_ptr, SHIFT)
    x_ptr = back(x_ptr, phase, WIDE_A, WORDS)
    out_ptr = back(out_ptr, phase, True, WORDS)
    limit = cols + phase
    # before all else: nothing waits for anything then
    if DENSE:
        x = load_block(x_ptr, start, limit, phase, BLOCK, SHIFT, WIDE_A)
    m, s = tl.load(stats_ptr + row), tl.load(stats_ptr + rows + row)
    if IDS:
        id_ptr += row_offset(row, id_blocks, id_outer, id_inner)
        grad_ptr += row.to(tl.int64) * grad_row
    column, id_, columns, grads = -1, ignore, -1, 0.0
    if IDS == 1:
        id_ = tl.load(id_ptr).to(tl.int64)
        column = column_of(id_, ignore, vocab_start, cols)
        column = tl.where(column < 0, -1, column + phase)
    elif IDS == 2:
        columns, grads = _some_ids(
            0, id_ptr, grad_ptr, ids, id_step, grad_step, ignore, vocab_start, cols, SOME
        )
    weight, total, skip = _upstream(
        row, s, stats_ptr, id_, grads, id_ptr, grad_ptr, entropy_ptr, entropy_row, ids, id_step,
        grad_step, ignore, vocab_start, rows, cols, inv_t, ENTROPY, IDS, SOME,
    )  # fmt: skip
    inv_s, centre = 1.0 / s, 0.0
    if ENTROPY:
        centre = tl.load(stats_ptr + 3 * rows.to(tl.int64) + row) / s
    if DENSE:
        _write_all(
            x, x_ptr, out_ptr, column, start, limit, phase, skip, m, inv_s, centre, weight, total,
            c, inv_t, ENTROPY, IDS == 1, SHIFT, WIDE_A, BLOCKS, BLOCK,
        )  # fmt: skip
    if IDS == 2 and (CLAIM or LAST):  # noqa: SIM102 - one is the compiler's, the other the device's
        if not skip:
            _write_ids(
                columns, grads, x_ptr, out_ptr, id_ptr, grad_ptr, ids, id_step, grad_step, ignore,
                vocab_start, cols, start, BLOCKS * BLOCK, limit, phase, m, inv_s, centre, weight,
                total, c, inv_t, ENTROPY, DENSE, CLAIM, LAST, SHIFT, ALL, SOME,
            )  # fmt: skip
