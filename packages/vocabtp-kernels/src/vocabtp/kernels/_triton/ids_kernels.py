"""The device side of ids: which are no tokens, the values of the others, what they weigh."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.loads import row_offset
from vocabtp.kernels._triton.online import LOWEST, finite_max, moved, moved_weighted, seen_max


@triton.jit
def column_of(id_, ignore, start, cols):
    """The column of an id, -1 for what is no column of this shard."""
    id_ = id_.to(tl.int64)
    local = id_ - start
    return tl.where((id_ != ignore) & (local >= 0) & (local < cols), local, -1).to(tl.int32)


@triton.jit(
    do_not_specialize=["rows", "ids", "inner", "id_outer", "id_inner", "id_step", "ignore", "size"]
)
def codes_kernel(
    id_ptr,
    code_ptr,
    cell_ptr,
    rows,
    ids,
    inner,
    id_outer,
    id_inner,
    id_step,
    ignore,
    size,
    CELL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The code of a row's first bad id."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    id_ptr += row_offset(row, inner, id_outer, id_inner)[:, None]
    code = tl.zeros([ROWS], tl.float32)
    for begin in range(0, ids, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        here = live[:, None] & (k < ids)[None, :]
        id_ = tl.load(id_ptr + (k.to(tl.int64) * id_step)[None, :], mask=here, other=0)
        id_ = id_.to(tl.int64)
        bad = here & (id_ != ignore) & ((id_ < 0) | (id_ >= size))
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
        "inner",
        "id_outer",
        "id_inner",
        "id_step",
        "ignore",
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
    value_ptr,
    id_ptr,
    stats_ptr,
    entropy_ptr,
    cell_ptr,
    rows,
    ids,
    inner,
    id_outer,
    id_inner,
    id_step,
    ignore,
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
    """Merged statistics, entropies, and log p in place of the chosen logits."""
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
        tl.store(stats_ptr + 3 * rows.to(tl.int64) + first, w, mask=live)
        tl.store(entropy_ptr + first, log_s - w / s, mask=live)
    bad = row < 0
    for rank in range(ranks):
        code = tl.load(code_ptr + rank * rank_stride.to(tl.int64) + row, mask=live, other=0.0)
        bad = bad | (code != 0.0)
    tl.store(stats_ptr + 2 * rows.to(tl.int64) + first, bad.to(tl.float32), mask=live)
    if CELL:
        tl.store(cell_ptr, 1, mask=tl.max(bad.to(tl.int32), 0) != 0)
    id_ptr += row_offset(row, inner, id_outer, id_inner)[:, None]
    for begin in range(0, ids, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        here = live[:, None] & (k < ids)[None, :]
        at = first[:, None] * ids + k[None, :]
        id_ = tl.load(id_ptr + (k.to(tl.int64) * id_step)[None, :], mask=here, other=0)
        id_ = id_.to(tl.int64)
        x = tl.load(value_ptr + at, mask=here, other=0.0)
        value = (x - m[:, None]) * inv_t - log_s[:, None]
        value = tl.where((bad | (s == 0.0))[:, None], float("nan"), value)
        tl.store(value_ptr + at, tl.where(id_ == ignore, 0.0, value), mask=here)


@triton.jit(
    do_not_specialize=[
        "rows",
        "ids",
        "tiles",
        "words",
        "id_blocks",
        "id_outer",
        "id_inner",
        "id_step",
        "ignore",
        "grad_row",
        "grad_step",
    ]
)
def sums_kernel(
    id_ptr,
    stats_ptr,
    grad_ptr,
    sum_ptr,
    repeat_ptr,
    rows,
    ids,
    tiles,
    words,
    id_blocks,
    id_outer,
    id_inner,
    id_step,
    ignore,
    grad_row,
    grad_step,
    inv_t,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """What a row's ids weigh together, whether one asks, and a bit for each that is not alone."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    id_ptr += row_offset(row, id_blocks, id_outer, id_inner)
    id_step = id_step.to(tl.int64)
    k = tile * BLOCK + tl.arange(0, BLOCK)
    # lower halves will do: they tell tokens apart, and a bit too many costs nothing but time
    mine = tl.load(id_ptr + k * id_step, mask=k < ids, other=0).to(tl.int32)
    alike = tl.zeros([BLOCK], tl.int32)
    # unrolled, so that several loads are on their way
    for j in tl.range(0, ids, loop_unroll_factor=8):
        alike += (mine == tl.load(id_ptr + j * id_step).to(tl.int32)).to(tl.int32)
    bits = tl.where((alike > 1) & (k < ids), 1, 0) << (tl.arange(0, BLOCK) % 32)
    word = tile * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    found = tl.sum(tl.reshape(bits, [BLOCK // 32, 32]), 1)
    tl.store(repeat_ptr + row.to(tl.int64) * words + word, found, mask=word < words)
    if tile == 0:
        bad = tl.load(stats_ptr + 2 * rows.to(tl.int64) + row)
        # a bad id anywhere on the row is a NaN there, wherever a gradient is not 0
        poison = tl.where(bad != 0.0, float("nan"), 0.0)
        grad_ptr += row.to(tl.int64) * grad_row
        total = tl.zeros([SOME], tl.float32)
        asked = tl.zeros([SOME], tl.int32)
        for some in range(0, ids, SOME):
            at = (some + tl.arange(0, SOME)).to(tl.int64)
            id_ = tl.load(id_ptr + at * id_step, mask=at < ids, other=0).to(tl.int64)
            grads = tl.load(grad_ptr + at * grad_step, mask=at < ids, other=0.0)
            grads = tl.where(id_ == ignore, 0.0, grads)
            asked = tl.where(grads != 0.0, 1, asked)
            total += tl.where(grads != 0.0, grads + poison, 0.0)
        tl.store(sum_ptr + row, tl.sum(total, 0) * inv_t)
        tl.store(sum_ptr + rows + row, tl.max(asked, 0).to(tl.float32))
