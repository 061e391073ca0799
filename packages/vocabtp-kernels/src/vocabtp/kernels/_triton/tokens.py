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
from vocabtp.kernels._triton.ids_kernels import codes_kernel, finish_tokens_kernel
from vocabtp.kernels._triton.merge import whole_rows
from vocabtp.kernels._triton.token_grad_kernels import token_grad_kernel
from vocabtp.kernels._triton.tokens_kernels import token_stats_kernel

# ids that a program takes at once
_IDS = 256
# and one of the gradient at most, to see which of all of a row's ids are not alone: it has as many
# times the threads, and no more than `launch.BLOCKS` times
_IDS_OF_ROW = 1024


def _tile(ids: int) -> tuple[int, int]:
    """Rows and ids of a program of one warp."""
    block = min(_IDS, triton.next_power_of_2(max(ids, 1)))
    return max(1, launch.ROW_BLOCK // block), block


def _place(ids: Rows) -> tuple[int, int, int, int]:
    """What a kernel needs to find an id: `launch.strides`, and the stride along a row."""
    return *launch.strides(ids), ids.blocks.stride(2)


def token_stats(
    logits: Rows,
    ids: Rows,
    bounds: Bounds,
    dtype: torch.dtype,
    temperature: float,
    *,
    entropy: bool,
    merged: bool,
    watch: Watch | None,
) -> TokenShard:
    """One read: `(m; S)` or `(m; S, W)`, and the logits at `ids`, 0 where they are not here.

    Ids come first, so that the device has the read left to do when a host waits for them.
    """
    codes = _codes(ids, bounds, dtype, watch)
    rows, cols, device = logits.num_rows, logits.num_cols, logits.device
    number = ids.num_cols
    chosen = torch.empty(rows, number, dtype=dtype, device=device)
    cut = launch.segments(cols)
    part = torch.empty(3 if entropy else 2, cut.number, rows, dtype=dtype, device=device)
    if rows == 0 or cols == 0:
        part[:1].fill_(-float("inf"))
        part[1:].fill_(0.0)
        chosen.fill_(0.0)
    else:
        c, inv_t = launch.LOG2E / temperature, 1.0 / temperature
        aligned = launch.alignment(logits)
        # of fp16 in shifted lanes ptxas spills a register
        half = logits.blocks.dtype == torch.float16
        registers = {launch.BLACKWELL: 104} if half and aligned["SHIFT"] else {}
        launch.run(
            token_stats_kernel,
            rows * cut.number,
            device,
            logits.blocks,
            part,
            ids.blocks,
            chosen,
            rows,
            cols,
            number,
            *_place(ids),
            bounds.ignore_index,
            bounds.vocab_start,
            *cut,
            *launch.strides(logits),
            c,
            inv_t,
            ENTROPY=entropy,
            SOME=_tile(number)[1] if number else 0,
            **aligned,
            STAGES=launch.STAGES,
            TILE=launch.TILE,
            **launch.capped(launch.READ, device, registers),
        )
    planes = part.transpose(0, 1)
    parts = ShardStats(planes[:, :1], planes[:, 1:], planes[:, :0])
    parts = whole_rows(parts, temperature, sides=1, weighted=entropy, merged=merged)
    return TokenShard(parts._replace(flags=codes), chosen)


def _codes(ids: Rows, bounds: Bounds, dtype: torch.dtype, watch: Watch | None) -> Tensor:
    """Codes `[1, 1, N]` of bad ids, none without ids."""
    rows, number = ids.num_rows, ids.num_cols
    codes = torch.empty(1, min(number, 1), rows, dtype=dtype, device=ids.device)
    if rows and number:
        cell = None if watch is None else watch.cell
        size, block = _tile(number)
        launch.run(
            codes_kernel,
            triton.cdiv(rows, size),
            ids.device,
            ids.blocks,
            codes,
            codes if cell is None else cell,
            rows,
            number,
            *_place(ids),
            bounds.ignore_index,
            bounds.vocab_size,
            CELL=cell is not None,
            ROWS=size,
            BLOCK=block,
            num_warps=1,
        )
        if watch is not None:
            watch.known(codes[:, 0], stored=cell is not None)
    return codes


def finish_tokens(
    stats: ShardStats,
    chosen: Tensor,
    ids: Rows,
    bounds: Bounds,
    temperature: float,
    *,
    entropy: bool,
    watch: Watch | None,
) -> TokenValues:
    """Merge `[P, *, N]` and finish, in one launch; log-probabilities come where `chosen` is."""
    rows, number = ids.num_rows, ids.num_cols
    if any(part.stride(-1) != 1 for part in stats):
        stats = ShardStats(*(part.contiguous() for part in stats))
    chosen = chosen.contiguous()
    out = stats.sums.new_empty(4 if entropy else 3, rows)
    entropies = out.new_empty(rows) if entropy else None
    if rows:
        cell = None if watch is None else watch.cell
        size, block = _tile(number)
        launch.run(
            finish_tokens_kernel,
            triton.cdiv(rows, size),
            out.device,
            stats.maxes,
            stats.sums,
            stats.flags if number else out,
            chosen,
            ids.blocks,
            out,
            out if entropies is None else entropies,
            out if cell is None else cell,
            rows,
            number,
            *_place(ids),
            bounds.ignore_index,
            stats.sums.shape[0],
            stats.maxes.stride(0),
            *stats.sums.stride()[:2],
            stats.flags.shape[0] if number else 0,
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
    return TokenValues(chosen, entropies, out)


def token_grad(
    logits: Rows,
    stats: Tensor,
    ids: Rows,
    bounds: Bounds,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    temperature: float,
) -> None:
    """One read, one write: `sum_k w_k (onehot_k - p) - w_h p (log p + H)` into `out` `[N, L]`."""
    rows, cols = logits.num_rows, logits.num_cols
    number = 0 if grad_logprobs is None else ids.num_cols
    if rows == 0 or cols == 0:
        return
    upstream = stats[:, None] if grad_logprobs is None or not number else grad_logprobs
    aligned = launch.grad_alignment([logits], [out])
    blocks = launch.programs_of_row(cols, aligned["SHIFT"])
    some, wide, options = _grad_options(number, out, grad_entropy is None, aligned)
    for does in _grad_launches(number, out.device):
        launch.run(
            token_grad_kernel,
            rows * blocks,
            logits.device,
            logits.blocks,
            out,
            stats,
            ids.blocks,
            upstream,
            stats if grad_entropy is None else grad_entropy,
            rows,
            cols,
            blocks,
            number,
            *launch.strides(logits),
            *_place(ids),
            bounds.ignore_index,
            bounds.vocab_start,
            *upstream.stride()[:2],
            0 if grad_entropy is None else grad_entropy.stride(0),
            launch.LOG2E / temperature,
            1.0 / temperature,
            ENTROPY=grad_entropy is not None,
            IDS=min(number, 2),
            **does,
            ALL=number <= _IDS_OF_ROW,
            BLOCKS=launch.BLOCKS // wide,
            BLOCK=launch.BLOCK * wide,
            SOME=some,
            **aligned,
            **options,
        )


def _grad_options(
    number: int, out: Tensor, alone: bool, aligned: dict[str, bool]
) -> tuple[int, int, dict[str, int]]:
    """For so many ids: how many are taken at once, by how many times the threads, launch options.

    A thread has two ids, however many there are, and a program the same columns. `alone` if there
    is no gradient of the entropy.
    """
    some = wide = 1
    if number > 1:
        some = min(_IDS_OF_ROW, max(_IDS, triton.next_power_of_2(number)))
        wide = some // _IDS
    registers = {}
    # of many ids beside the entropy, or in shifted lanes, ptxas spills a register on some chip
    if wide > 1 and (aligned["SHIFT"] or not alone):
        registers = {launch.ANY: 96}
    elif wide == 1 and number > 1 and not alone:
        registers = {launch.ANY: 72}
    elif number == 1 and out.element_size() == 2 and aligned["WIDE_A"]:
        # an H200 gains up to a tenth by the programs that then run at once
        registers = {launch.HOPPER: 32}
    elif wide == 1 and number and out.element_size() == 2:
        # as above, but several ids, or logits loaded by words, are slower with 32
        registers = {launch.HOPPER: 40}
    options = launch.capped(launch.WRITE, out.device, registers)
    return some, wide, {**options, "num_warps": options["num_warps"] * wide}


def _grad_launches(number: int, device: torch.device) -> list[dict[str, bool]]:
    """What each launch for so many ids does: all at once where a barrier orders memory."""
    steps = ("DENSE", "CLAIM", "LAST")
    if number < 2 or launch.ordering_barrier(device):
        return [dict.fromkeys(steps, True)]
    # which of more ids than one program sees share a column, nobody asks
    own = [step for step in steps if step != "CLAIM" or number <= _IDS_OF_ROW]
    return [{name: name == step for name in steps} for step in own]
