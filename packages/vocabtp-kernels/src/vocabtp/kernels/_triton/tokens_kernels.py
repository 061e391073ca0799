"""The device side of `tokens`: what a program does with one segment or block of a row."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.ids_kernels import BAD, IGNORED
from vocabtp.kernels._triton.loads import (
    back,
    first_tile,
    in_whole,
    lanes_of,
    load_at,
    load_block,
    masked4,
    next4,
    phase_of,
    ragged,
    row_offset,
    store_block,
    whole_tiles,
)
from vocabtp.kernels._triton.online import (
    LOWEST,
    fold,
    moved,
    moved_weighted,
    raise_max,
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
def _step(m, total, weighted, x0, x1, x2, x3, c, E: tl.constexpr):
    m, shift, weight = raise_max(m, x0, x1, x2, x3, c)
    total *= weight
    if E:
        # the sum moved first: a shift may be as large as a number can be
        weighted = weighted * weight + shift * total
    total, weighted = _add(total, weighted, x0, m, c, E)
    total, weighted = _add(total, weighted, x1, m, c, E)
    total, weighted = _add(total, weighted, x2, m, c, E)
    total, weighted = _add(total, weighted, x3, m, c, E)
    return m, total, weighted


@triton.jit
def _choose(x_ptr, column_ptr, chosen_ptr, ids, start, stop, SOME: tl.constexpr):
    """The logits at a row's columns of this segment; the first one also writes 0 for no column.

    Behind the read, the logits are still in a cache.
    """
    for some in range(0, ids, SOME):
        k = some + tl.arange(0, SOME)
        column = tl.load(column_ptr + k, mask=k < ids, other=stop)
        mine = (column >= start) & (column < stop)
        x = tl.load(x_ptr + column, mask=mine, other=0.0).to(tl.float32)
        tl.store(chosen_ptr + k, x, mask=mine | ((column < 0) & (start == 0)))


@triton.jit(do_not_specialize=["rows", "ids", "n_seg", "inner"])
def token_stats_kernel(
    x_ptr,
    part_ptr,
    column_ptr,
    chosen_ptr,
    rows,
    cols,
    ids,
    n_seg,
    seg_cols,
    inner,
    stride_outer,
    stride_inner,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    SOME: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE_A: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) // n_seg
    seg = tl.program_id(0) % n_seg
    x_ptr += row_offset(row, inner, stride_outer, stride_inner)
    phase = phase_of(x_ptr, SHIFT)
    x_ptr = back(x_ptr, phase, WIDE_A)
    start = seg * seg_cols
    stop = tl.minimum(start + seg_cols, cols)
    limit = cols + phase
    lanes, ahead = lanes_of(phase, TILE)
    m = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE], tl.float32)
    last = first_tile(x_ptr, start, phase, limit, TILE, SHIFT)
    masked = start + whole_tiles(start, stop, cols, phase, 4, TILE, SHIFT) * (4 * TILE)
    for first in tl.range(start, masked, 4 * TILE, num_stages=STAGES):
        at = first + tl.arange(0, TILE)
        x0, x1, x2, x3, last = next4(x_ptr, at, last, ahead, TILE, SHIFT)
        m, total, weighted = _step(m, total, weighted, x0, x1, x2, x3, c, ENTROPY)
    for first in range(masked, stop, 4 * TILE):
        x0, x1, x2, x3 = masked4(x_ptr, first + lanes, limit, TILE)
        m, total, weighted = _step(m, total, weighted, x0, x1, x2, x3, c, ENTROPY)
    if SOME:
        ids_at = row.to(tl.int64) * ids
        _choose(x_ptr + phase, column_ptr + ids_at, chosen_ptr + ids_at, ids, start, stop, SOME)
    top = tl.max(m, 0)
    shift = tl.maximum(m - top, LOWEST)
    sum_ = fold(moved(total, shift, c), phase, TILE, SHIFT)
    out = part_ptr + seg * rows.to(tl.int64) + row
    plane = n_seg.to(tl.int64) * rows
    tl.store(out, seen_max(top, sum_))
    tl.store(out + plane, sum_)
    if ENTROPY:
        moved_w = moved_weighted(weighted, total, shift, 0.0, c, 1.0)
        tl.store(out + 2 * plane, fold(moved_w, phase, TILE, SHIFT) * inv_t)


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
def _write_ids(
    x_ptr, out_ptr, column_ptr, weight_ptr, ids, start, width, limit, phase, m, inv_s, centre,
    weight, total, c, inv_t,
    ENTROPY: tl.constexpr, DENSE: tl.constexpr, SHIFT: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The program's columns with ids once more, while they are near."""
    if DENSE:
        # after all of the program's stores
        tl.debug_barrier()
    for some in range(0, ids, SOME):
        k = some + tl.arange(0, SOME)
        column = tl.load(column_ptr + k, mask=k < ids, other=-1)
        at = column + phase
        mine = (at >= start) & (at < start + width)
        if SHIFT:
            whole = in_whole(at, phase, limit, SHIFT)
            mine = (mine & whole) | ((start == 0) & (whole == 0))
        mine = mine & (column >= 0)
        x = tl.load(x_ptr + at, mask=mine, other=0.0).to(tl.float32)
        own = _grad_of_p(x, m, inv_s, centre, weight, total, c, inv_t, ENTROPY)
        own += tl.load(weight_ptr + k, mask=mine, other=0.0)
        tl.store(out_ptr + at, own, mask=mine)


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
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_OUT_A: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """`IDS` is 0, 1, or 2 for many: then `weights_kernel` has been, and `grad_ptr` its sums.

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
    weight, total, skip = _upstream(
        row, s, column_ptr, grad_ptr, grad_row, entropy_ptr, entropy_row, inv_t, rows, ENTROPY, IDS
    )
    inv_s = 1.0 / s
    centre = 0.0
    if ENTROPY:
        centre = tl.load(stats_ptr + 2 * rows.to(tl.int64) + row) / s
    if DENSE:
        column = -1
        if IDS == 1:
            column = tl.load(column_ptr + row) + phase
            # codes of no column stay below 0
            column = tl.where(column < phase, -1, column)
        for i in tl.static_range(BLOCKS):
            first = start + i * BLOCK
            if i + 1 < BLOCKS:
                next_x = load_block(x_ptr, first + BLOCK, limit, phase, BLOCK, SHIFT)
            grad = _grad(
                x, first + tl.arange(0, BLOCK), column, skip, m, inv_s, centre, weight, total, c,
                inv_t, ENTROPY, IDS == 1,
            )  # fmt: skip
            store_block(out_ptr, first, limit, phase, grad, BLOCK, SHIFT, False)
            if i + 1 < BLOCKS:
                x = next_x
        if SHIFT and start == 0:
            at, mine = ragged(phase, limit)
            ragged_grad = _grad(
                load_at(x_ptr, at, mine), at, column, skip, m, inv_s, centre, weight, total, c,
                inv_t, ENTROPY, IDS == 1,
            )  # fmt: skip
            tl.store(out_ptr + at, ragged_grad, mask=mine)
    if IDS == 2 and LAST:  # noqa: SIM102 - one is the compiler's, the other the device's
        if not skip:
            first_id = row.to(tl.int64) * ids
            _write_ids(
                x_ptr, out_ptr, column_ptr + first_id, weight_ptr + first_id, ids, start,
                BLOCKS * BLOCK, limit, phase, m, inv_s, centre, weight, total, c, inv_t,
                ENTROPY, DENSE, SHIFT, SOME,
            )  # fmt: skip
