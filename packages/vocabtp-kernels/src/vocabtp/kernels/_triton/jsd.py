"""Generalized JSD, m = beta q + (1 - beta) p with 0 < beta < 1; see `mixture` for its logarithms.

A token's term is t = beta q log(q/m) + (1 - beta) p log(p/m), never negative. A segment is summed
the quick way first, and once more the exact way where the sum turns out small against the
probability that it covers: there the quick way has no digits, and the logits are still in a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.jsd_grad_kernels import jsd_grad_kernel
from vocabtp.kernels._triton.jsd_kernels import jsd_terms_kernel
from vocabtp.kernels._triton.kl import two_sides
from vocabtp.kernels._triton.merge import added
from vocabtp.kernels._triton.mixture import series

# betas outside of these go the exact way alone, with a log1p for each side
_ENDS = (0.05, 0.95)
_EXACT_TILE = 256


def pair_stats(
    p: Rows, q: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
) -> ShardStats:
    """The first read: `(m_p, m_q; S_p, S_q)` `[P, *, N]`."""
    return two_sides(p, q, dtype, temperature, kl=False, merged=merged)


def jsd_terms(
    p: Rows,
    q: Rows,
    stats: ShardStats,
    temperature: float,
    beta: float,
    clip: float | None,
    *,
    merged: bool,
) -> Tensor:
    """The second read: `[P, 3, N]` sums of t (capped), w p log(p/m) and w q log(q/m)."""
    rows, cols, device = p.num_rows, p.num_cols, p.device
    cut = launch.segments(cols)
    part = stats.sums.new_empty(3, cut.number, rows)
    if rows == 0 or cols == 0:
        return part.fill_(0.0).transpose(0, 1)
    launch.run(
        jsd_terms_kernel,
        rows * cut.number,
        device,
        p.blocks,
        q.blocks,
        stats.maxes,
        stats.sums,
        part,
        rows,
        cols,
        *cut,
        *launch.strides(p),
        *launch.strides(q),
        *_scalars(temperature, beta, clip),
        ENDS=not _ENDS[0] <= beta <= _ENDS[1],
        CLIP=clip is not None,
        HARDWARE=launch.hardware_log(device),
        **launch.alignment(p, q),
        STAGES=launch.TERMS_STAGES,
        TILE=launch.TILE,
        EXACT_TILE=_EXACT_TILE,
        **launch.TERMS,
    )
    return added(part.transpose(0, 1), merged=merged)


def _scalars(temperature: float, beta: float, clip: float | None) -> tuple[float, ...]:
    cap = 0.0 if clip is None else clip
    return (launch.LOG2E / temperature, 1.0 / temperature, cap, beta, 1.0 - beta, *series(beta))


def jsd_grad(
    p: Rows,
    q: Rows,
    stats: ShardStats,
    terms: Tensor,
    upstream: Tensor,
    factor: float,
    out_p: Tensor | None,
    out_q: Tensor | None,
    temperature: float,
    beta: float,
    clip: float | None,
) -> None:
    """One more read, one write a side: `upstream` `[N]` times `factor` times the gradients."""
    rows, cols = p.num_rows, p.num_cols
    outs = [x for x in (out_p, out_q) if x is not None]
    if rows == 0 or cols == 0 or not outs:
        return
    aligned = launch.grad_alignment([p, q], [out_p, out_q])
    blocks = launch.programs_of_row(cols, aligned["SHIFT"])
    ends = not _ENDS[0] <= beta <= _ENDS[1]
    # ptxas, left alone, spills a register of these on some chip
    registers = {}
    if ends and clip is not None:
        registers = {launch.ANY: 200, launch.BLACKWELL: 255}
    elif p.blocks.dtype == q.blocks.dtype == torch.float32 and not ends and clip is None:
        registers = {launch.ANY: 96, launch.BLACKWELL: 104}
        # sides that begin elsewhere than two gradients are brought into the lanes of these
        if len(outs) == 2 and not (aligned["WIDE_A"] and aligned["WIDE_B"]):
            registers = {launch.ANY: 128}
    launch.run(
        jsd_grad_kernel,
        rows * blocks,
        p.device,
        p.blocks,
        q.blocks,
        outs[0] if out_p is None else out_p,
        outs[0] if out_q is None else out_q,
        stats.maxes,
        stats.sums,
        terms,
        upstream,
        rows,
        cols,
        blocks,
        upstream.stride(0),
        *launch.strides(p),
        *launch.strides(q),
        *_scalars(temperature, beta, clip),
        factor,
        GRAD_P=out_p is not None,
        GRAD_Q=out_q is not None,
        ENDS=ends,
        CLIP=clip is not None,
        HARDWARE=launch.hardware_log(p.device),
        **aligned,
        BLOCKS=launch.BLOCKS,
        BLOCK=launch.BLOCK,
        **launch.capped(launch.WRITE, p.device, registers),
    )
