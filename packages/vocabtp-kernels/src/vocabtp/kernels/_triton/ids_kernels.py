"""The device side of ids: which are no tokens, and the values of the others."""

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
