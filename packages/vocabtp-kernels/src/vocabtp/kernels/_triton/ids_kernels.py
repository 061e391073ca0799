"""The device side of ids: which columns they are, their values, what each of them weighs."""

import triton
import triton.language as tl

from vocabtp.kernels import _ids
from vocabtp.kernels._triton.online import LOWEST, finite_max, moved, moved_weighted, seen_max

ELSEWHERE = tl.constexpr(_ids.ELSEWHERE)
IGNORED = tl.constexpr(_ids.IGNORED)
BAD = tl.constexpr(_ids.BAD)


@triton.jit(do_not_specialize=["rows", "ids", "id_row", "id_step", "ignore", "start", "size"])
def resolve_kernel(
    id_ptr,
    column_ptr,
    code_ptr,
    cell_ptr,
    rows,
    ids,
    cols,
    id_row,
    id_step,
    ignore,
    start,
    size,
    CELL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Columns, and the code of a row's first bad id."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    first = row.to(tl.int64)
    code = tl.zeros([ROWS], tl.float32)
    for begin in range(0, ids, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        here = live[:, None] & (k < ids)[None, :]
        at = first[:, None] * id_row + k.to(tl.int64)[None, :] * id_step
        id_ = tl.load(id_ptr + at, mask=here, other=0).to(tl.int64)
        ignored = id_ == ignore
        bad = here & (id_ != ignore) & ((id_ < 0) | (id_ >= size))
        local = id_ - start
        column = tl.where((local >= 0) & (local < cols), local, ELSEWHERE)
        column = tl.where(ignored, IGNORED, tl.where(bad, BAD, column))
        at = first[:, None] * ids + k[None, :]
        tl.store(column_ptr + at, column.to(tl.int32), mask=here)
        # never 0, whatever the id
        named = tl.where(id_ >= 0, id_ + 1, id_).to(tl.float32)
        lowest = tl.min(tl.where(bad, k[None, :], ids), 1)
        named = tl.sum(tl.where(bad & (k[None, :] == lowest[:, None]), named, 0.0), 1)
        code = tl.where(code == 0.0, named, code)
    tl.store(code_ptr + row, code, mask=live)
    if CELL:
        tl.store(cell_ptr, 1, mask=tl.max((code != 0.0).to(tl.int32), 0) != 0)


@triton.jit
def _merge(
    max_ptr,
    sum_ptr,
    row,
    live,
    parts,
    max_stride,
    sum_stride,
    plane,
    c,
    inv_t,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """m, S and W of parts of a row, or of ranks, in their order."""
    top = tl.full([N], LOWEST, tl.float32)
    for part in range(parts):
        at = part * max_stride.to(tl.int64) + row
        top = tl.maximum(top, tl.load(max_ptr + at, mask=live, other=0.0))
    total = tl.zeros([N], tl.float32)
    weighted = tl.zeros([N], tl.float32)
    for part in range(parts):
        at = part * max_stride.to(tl.int64) + row
        shift = finite_max(tl.load(max_ptr + at, mask=live, other=0.0))
        shift = tl.maximum(shift - top, LOWEST)
        at = part * sum_stride.to(tl.int64) + row
        s = tl.load(sum_ptr + at, mask=live, other=0.0)
        total += moved(s, shift, c)
        if W:
            w = tl.load(sum_ptr + plane.to(tl.int64) + at, mask=live, other=0.0)
            weighted += moved_weighted(w, s, shift, 0.0, c, inv_t)
    return seen_max(top, total), total, weighted


@triton.jit(
    do_not_specialize=[
        "rows",
        "ids",
        "parts",
        "max_stride",
        "sum_stride",
        "plane",
        "ranks",
        "rank_stride",
    ]
)
def finish_tokens_kernel(
    max_ptr,
    sum_ptr,
    code_ptr,
    chosen_ptr,
    column_ptr,
    stats_ptr,
    value_ptr,
    entropy_ptr,
    cell_ptr,
    rows,
    ids,
    parts,
    max_stride,
    sum_stride,
    plane,
    ranks,
    rank_stride,
    c,
    inv_t,
    ENTROPY: tl.constexpr,
    CELL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merged statistics, log p of the chosen logits, entropies; bad rows' columns become BAD."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    m, s, w = _merge(
        max_ptr, sum_ptr, row, live, parts, max_stride, sum_stride, plane, c, inv_t, ENTROPY, ROWS
    )
    first = row.to(tl.int64)
    tl.store(stats_ptr + first, m, mask=live)
    tl.store(stats_ptr + rows + first, s, mask=live)
    log_s = tl.log(s)
    if ENTROPY:
        tl.store(stats_ptr + 2 * rows.to(tl.int64) + first, w, mask=live)
        tl.store(entropy_ptr + first, log_s - w / s, mask=live)
    bad = row < 0
    for rank in range(ranks):
        code = tl.load(code_ptr + rank * rank_stride.to(tl.int64) + row, mask=live, other=0.0)
        bad = bad | (code != 0.0)
    if CELL:
        tl.store(cell_ptr, 1, mask=tl.max(bad.to(tl.int32), 0) != 0)
    for begin in range(0, ids, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        here = live[:, None] & (k < ids)[None, :]
        at = first[:, None] * ids + k[None, :]
        asked = tl.load(column_ptr + at, mask=here, other=IGNORED) != IGNORED
        x = tl.load(chosen_ptr + at, mask=here, other=0.0)
        value = (x - m[:, None]) * inv_t - log_s[:, None]
        value = tl.where((bad | (s == 0.0))[:, None], float("nan"), value)
        tl.store(value_ptr + at, tl.where(asked, value, 0.0), mask=here)
        tl.store(column_ptr + at, BAD, mask=asked & bad[:, None])


@triton.jit(do_not_specialize=["rows", "ids", "tiles", "grad_row", "grad_step"])
def weights_kernel(
    column_ptr,
    grad_ptr,
    sum_ptr,
    weight_ptr,
    rows,
    ids,
    tiles,
    grad_row,
    grad_step,
    inv_t,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """What each id's column weighs in all, what a row's ids weigh, and whether anything asks.

    Weights are added in the ids' order, so that every id that names a column has the same bits.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    column_ptr += row * ids
    grad_ptr += row * grad_row
    grad_step = grad_step.to(tl.int64)
    k = tile * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(column_ptr + k, mask=k < ids, other=ELSEWHERE)
    weight = tl.zeros([BLOCK], tl.float32)
    # unrolled, so that several loads are on their way
    for j in tl.range(0, ids, loop_unroll_factor=8):
        other = tl.load(column_ptr + j)
        grad = tl.load(grad_ptr + j * grad_step)
        weight = tl.where(mine == other, weight + grad, weight)
    tl.store(weight_ptr + row * ids + k, weight * inv_t, mask=k < ids)
    if tile == 0:
        total = tl.zeros([SOME], tl.float32)
        asked = tl.zeros([SOME], tl.int32)
        for first in range(0, ids, SOME):
            at = first + tl.arange(0, SOME)
            columns = tl.load(column_ptr + at, mask=at < ids, other=IGNORED)
            grads = tl.load(grad_ptr + at * grad_step, mask=at < ids, other=0.0)
            grads = tl.where(columns == IGNORED, 0.0, grads)
            asked = tl.where(grads != 0.0, 1, asked)
            # a bad id anywhere on the row is a NaN there, wherever its gradient is not 0
            total += tl.where((columns == BAD) & (grads != 0.0), float("nan"), grads)
        tl.store(sum_ptr + row, tl.sum(total, 0) * inv_t)
        tl.store(sum_ptr + rows + row, tl.max(asked, 0).to(tl.float32))
