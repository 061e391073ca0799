"""KL(A || B): u_a and u_b are the centred logits, d = u_a - u_b, W = sum exp(u_a) d.

log a - log b = d + log(S_b / S_a), and log a - log b - KL is d - W / S_a exactly. With a clip c a
token's term is t = min(a (log a - log b), c); w is 1 where the term is below the cap, and
f = w (log a - log b + 1) is what the gradient to A needs of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.kl_grad_kernels import kl_grad_kernel
from vocabtp.kernels._triton.kl_kernels import kl_terms_kernel, pair_stats_kernel
from vocabtp.kernels._triton.merge import added, whole_rows


def two_sides(
    a: Rows, b: Rows, dtype: torch.dtype, temperature: float, *, kl: bool, merged: bool
) -> ShardStats:
    """Statistics `[P, *, N]` of two sides, those of KL or maxima and sums alone."""
    rows, cols, device = a.num_rows, a.num_cols, a.device
    cut = launch.segments(cols)
    part = torch.empty(6 if kl else 4, cut.number, rows, dtype=dtype, device=device)
    planes = part.transpose(0, 1)
    stats = ShardStats(planes[:, :2], planes[:, 2:5], planes[:, 5:])
    if rows == 0 or cols == 0:
        part[:2].fill_(-float("inf"))
        part[2:].fill_(0.0)
        return stats
    c, inv_t = launch.LOG2E / temperature, 1.0 / temperature
    aligned = launch.alignment(a, b)
    # of fp16 in shifted lanes ptxas spills a register
    half = torch.float16 in (a.blocks.dtype, b.blocks.dtype)
    registers = {launch.BLACKWELL: 184} if half and aligned["SHIFT"] else {}
    launch.run(
        pair_stats_kernel,
        rows * cut.number,
        device,
        a.blocks,
        b.blocks,
        part,
        rows,
        cols,
        *cut,
        *launch.strides(a),
        *launch.strides(b),
        c,
        inv_t,
        WEIGHTED=kl,
        STAGES=launch.STAGES,
        TILE=launch.TILE,
        **aligned,
        **launch.capped(launch.READ, device, registers),
    )
    return whole_rows(stats, temperature, sides=2, weighted=kl, merged=merged)


def kl_stats(
    a: Rows, b: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
) -> ShardStats:
    """One read of each side: `(m_a, m_b; S_a, S_b, W; A supports what B masks)` `[P, *, N]`."""
    return two_sides(a, b, dtype, temperature, kl=True, merged=merged)


def kl_terms(
    a: Rows, b: Rows, stats: ShardStats, temperature: float, clip: float, *, merged: bool
) -> Tensor:
    """The second read that a clip costs: `[P, 3, N]` sums of t, a f and w a over this shard."""
    rows, cols, device = a.num_rows, a.num_cols, a.device
    cut = launch.segments(cols)
    part = stats.sums.new_empty(3, cut.number, rows)
    if rows == 0 or cols == 0:
        return part.fill_(0.0).transpose(0, 1)
    launch.run(
        kl_terms_kernel,
        rows * cut.number,
        device,
        a.blocks,
        b.blocks,
        stats.maxes,
        stats.sums,
        part,
        rows,
        cols,
        *cut,
        *launch.strides(a),
        *launch.strides(b),
        launch.LOG2E / temperature,
        1.0 / temperature,
        clip,
        STAGES=launch.TERMS_STAGES,
        TILE=launch.TILE,
        **launch.alignment(a, b),
        **launch.TERMS,
    )
    return added(part.transpose(0, 1), merged=merged)


def kl_grad(
    a: Rows,
    b: Rows,
    stats: ShardStats,
    terms: Tensor | None,
    upstream: Tensor,
    factor: float,
    out_a: Tensor | None,
    out_b: Tensor | None,
    temperature: float,
    clip: float | None,
) -> None:
    """One more read, one write a side: `upstream` `[N]` times `factor` times the gradients."""
    rows, cols = a.num_rows, a.num_cols
    outs = [x for x in (out_a, out_b) if x is not None]
    if rows == 0 or cols == 0 or not outs:
        return
    aligned = launch.grad_alignment([a, b], [out_a, out_b])
    blocks = launch.programs_of_row(cols, aligned["SHIFT"])
    launch.run(
        kl_grad_kernel,
        rows * blocks,
        a.device,
        a.blocks,
        b.blocks,
        outs[0] if out_a is None else out_a,
        outs[0] if out_b is None else out_b,
        stats.maxes,
        stats.sums,
        stats.flags,
        stats.sums if terms is None else terms,
        upstream,
        rows,
        cols,
        blocks,
        upstream.stride(0),
        *launch.strides(a),
        *launch.strides(b),
        launch.LOG2E / temperature,
        1.0 / temperature,
        0.0 if clip is None else clip,
        factor,
        GRAD_A=out_a is not None,
        GRAD_B=out_b is not None,
        CLIP=clip is not None,
        BLOCKS=launch.BLOCKS,
        BLOCK=launch.BLOCK,
        **aligned,
        **launch.WRITE,
    )
