"""The device side of `tokens`, forward: what a program does with one segment of a row."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.ids_kernels import column_of
from vocabtp.kernels._triton.loads import (
    back,
    first_tile,
    lanes_of,
    masked4,
    next4,
    phase_of,
    row_offset,
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
def _choose(
    x_ptr, id_ptr, chosen_ptr, ids, id_step, ignore, vocab_start, cols, start, stop,
    SOME: tl.constexpr,
):  # fmt: skip
    """The logits at a row's ids of this segment; the first one also writes 0 for no column.

    Behind the read, the logits are still in a cache.
    """
    for some in range(0, ids, SOME):
        k = some + tl.arange(0, SOME)
        id_ = tl.load(id_ptr + k.to(tl.int64) * id_step, mask=k < ids, other=0)
        column = column_of(id_, ignore, vocab_start, cols)
        mine = (k < ids) & (column >= start) & (column < stop)
        x = tl.load(x_ptr + column, mask=mine, other=0.0).to(tl.float32)
        none = (k < ids) & (column < 0) & (start == 0)
        tl.store(chosen_ptr + k, x, mask=mine | none)


@triton.jit(
    do_not_specialize=[
        "rows",
        "ids",
        "id_blocks",
        "id_outer",
        "id_inner",
        "id_step",
        "ignore",
        "vocab_start",
        "n_seg",
        "inner",
    ]
)
def token_stats_kernel(
    x_ptr,
    part_ptr,
    id_ptr,
    chosen_ptr,
    rows,
    cols,
    ids,
    id_blocks,
    id_outer,
    id_inner,
    id_step,
    ignore,
    vocab_start,
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
    x_ptr = back(x_ptr, phase, WIDE_A, False)
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
        _choose(
            x_ptr + phase, id_ptr + row_offset(row, id_blocks, id_outer, id_inner),
            chosen_ptr + row.to(tl.int64) * ids, ids, id_step, ignore, vocab_start, cols, start,
            stop, SOME,
        )  # fmt: skip
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
