"""Log-probabilities and entropy of one distribution: p = exp(u) / S, u = (x - m) / T.

S = sum exp(u), W = sum exp(u) u. With the saved ratio W / S, log p + H is u - W / S exactly. On the
device exp(u) is exp2((x - m) c) with c = log2(e) / T.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vocabtp.kernels._ids import Bounds, Watch
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import ShardStats, TokenShard, TokenValues
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.ids_kernels import finish_tokens_kernel, resolve_kernel, weights_kernel
from vocabtp.kernels._triton.merge import whole_rows
from vocabtp.kernels._triton.tokens_kernels import token_grad_kernel, token_stats_kernel

# ids that a program takes at once
_IDS = 256
# so few rows leave most of a chip idle if a program takes that many of their ids
_FEW_ROWS = 1024


def _tile(ids: int) -> tuple[int, int]:
    """Rows and ids of a program of one warp."""
    block = min(_IDS, triton.next_power_of_2(max(ids, 1)))
    return max(1, launch.ROW_BLOCK // block), block


def token_stats(
    logits: Rows,
    ids: Tensor,
    bounds: Bounds,
    dtype: torch.dtype,
    temperature: float,
    *,
    entropy: bool,
    merged: bool,
    watch: Watch | None,
) -> TokenShard:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `ids` `[N, K]`, 0 where not here.

    Ids come first, so that the device has the read left to do when a host waits for them.
    """
    columns, codes = _resolve(logits, ids, bounds, dtype, watch)
    rows, cols, device = logits.num_rows, logits.num_cols, logits.device
    number = columns.shape[1]
    chosen = torch.empty(columns.shape, dtype=dtype, device=device)
    cut = launch.segments(cols)
    part = torch.empty(3 if entropy else 2, cut.number, rows, dtype=dtype, device=device)
    if rows == 0 or cols == 0:
        part[:1].fill_(-float("inf"))
        part[1:].fill_(0.0)
        chosen.fill_(0.0)
    else:
        c, inv_t = launch.LOG2E / temperature, 1.0 / temperature
        launch.run(
            token_stats_kernel,
            rows * cut.number,
            device,
            logits.blocks,
            part,
            columns,
            chosen,
            rows,
            cols,
            number,
            *cut,
            *launch.strides(logits),
            c,
            inv_t,
            ENTROPY=entropy,
            SOME=_tile(number)[1] if number else 0,
            **launch.alignment(logits),
            STAGES=launch.STAGES,
            TILE=launch.TILE,
            **launch.READ,
        )
    planes = part.transpose(0, 1)
    parts = ShardStats(planes[:, :1], planes[:, 1:], planes[:, :0])
    parts = whole_rows(parts, temperature, sides=1, weighted=entropy, merged=merged)
    return TokenShard(parts._replace(flags=codes), columns, chosen)


def _resolve(
    logits: Rows, ids: Tensor, bounds: Bounds, dtype: torch.dtype, watch: Watch | None
) -> tuple[Tensor, Tensor]:
    """Columns `[N, K]`, and codes `[1, 1, N]` of bad ids (none without ids)."""
    number, rows, device = ids.shape[1], logits.num_rows, logits.device
    columns = torch.empty(ids.shape, dtype=torch.int32, device=device)
    codes = torch.empty(1, min(number, 1), rows, dtype=dtype, device=device)
    if rows and number:
        cell = None if watch is None else watch.cell
        size, block = _tile(number)
        launch.run(
            resolve_kernel,
            triton.cdiv(rows, size),
            device,
            ids,
            columns,
            codes,
            columns if cell is None else cell,
            rows,
            number,
            logits.num_cols,
            *ids.stride(),
            *bounds,
            CELL=cell is not None,
            ROWS=size,
            BLOCK=block,
            num_warps=1,
        )
        if watch is not None:
            watch.known(codes[:, 0], stored=cell is not None)
    return columns, codes


def finish_tokens(
    stats: ShardStats,
    chosen: Tensor,
    columns: Tensor,
    temperature: float,
    *,
    entropy: bool,
    watch: Watch | None,
) -> TokenValues:
    """Merge `[P, *, N]` and finish, in one launch; `columns` of rows with a bad id become BAD."""
    rows, ids = columns.shape
    if any(part.stride(-1) != 1 for part in stats):
        stats = ShardStats(*(part.contiguous() for part in stats))
    out = stats.sums.new_empty(3 if entropy else 2, rows)
    entropies = out.new_empty(rows) if entropy else None
    values = out.new_empty(rows, ids)
    if rows:
        cell = None if watch is None else watch.cell
        size, block = _tile(ids)
        launch.run(
            finish_tokens_kernel,
            triton.cdiv(rows, size),
            out.device,
            stats.maxes,
            stats.sums,
            stats.flags if ids else out,
            chosen.contiguous(),
            columns,
            out,
            values,
            values if entropies is None else entropies,
            out if cell is None else cell,
            rows,
            ids,
            stats.sums.shape[0],
            stats.maxes.stride(0),
            *stats.sums.stride()[:2],
            stats.flags.shape[0] if ids else 0,
            stats.flags.stride(0),
            launch.LOG2E / temperature,
            1.0 / temperature,
            ENTROPY=entropy,
            CELL=cell is not None,
            ROWS=size,
            BLOCK=block,
            num_warps=1,
        )
        if watch is not None:
            watch.known(stats.flags[:, 0], stored=cell is not None)
    return TokenValues(values, entropies, out)


def _weigh(columns: Tensor, grad: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What a row's ids weigh and whether they do `[2, N]`, and what each id's column does."""
    rows, ids = columns.shape
    sums = grad.new_empty(2, rows)
    weights = grad.new_empty(rows, ids)
    some = min(_IDS, triton.next_power_of_2(ids))
    # few rows are spread over the chip; a weight's bits are the same in any block
    block = min(some, 32) if rows <= _FEW_ROWS else some
    tiles = triton.cdiv(ids, block)
    launch.run(
        weights_kernel,
        rows * tiles,
        grad.device,
        columns,
        grad,
        sums,
        weights,
        rows,
        ids,
        tiles,
        *grad.stride(),
        1.0 / temperature,
        BLOCK=block,
        SOME=some,
        num_warps=1,
    )
    return sums, weights


def token_grad(
    logits: Rows,
    stats: Tensor,
    columns: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    temperature: float,
) -> None:
    """One read, one write: `sum_k w_k (onehot_k - p) - w_h p (log p + H)` into `out` `[N, L]`."""
    rows, cols = logits.num_rows, logits.num_cols
    ids = 0 if grad_logprobs is None else columns.shape[1]
    if rows == 0 or cols == 0:
        return
    upstream = weights = stats
    if grad_logprobs is not None and ids:
        upstream = grad_logprobs
        if ids > 1:
            upstream, weights = _weigh(columns, grad_logprobs, temperature)
    aligned = launch.alignment(logits, outs=(out,))
    blocks = launch.programs_of_row(cols, aligned["SHIFT"])
    # two stores to one place keep their order across a barrier where barriers order memory
    parts = (True, False) if ids > 1 and not launch.ordering_barrier(out.device) else (True,)
    for dense in parts:
        launch.run(
            token_grad_kernel,
            rows * blocks,
            logits.device,
            logits.blocks,
            out,
            stats,
            columns,
            upstream,
            weights,
            stats if grad_entropy is None else grad_entropy,
            rows,
            cols,
            blocks,
            ids,
            *launch.strides(logits),
            upstream.stride(0),
            0 if grad_entropy is None else grad_entropy.stride(0),
            launch.LOG2E / temperature,
            1.0 / temperature,
            ENTROPY=grad_entropy is not None,
            IDS=min(ids, 2),
            DENSE=dense,
            LAST=dense is parts[-1],
            BLOCKS=launch.BLOCKS,
            BLOCK=launch.BLOCK,
            SOME=min(_IDS, triton.next_power_of_2(max(ids, 1))),
            **aligned,
            **launch.WRITE,
        )
