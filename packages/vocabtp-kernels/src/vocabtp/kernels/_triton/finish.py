"""What `_stats` does to `[N]` statistics, one launch each: few rows are bound by launches."""

from __future__ import annotations

import triton
from torch import Tensor

from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.finish_kernels import finish_kernel


def _finish(kind: str, stats: ShardStats, terms: Tensor | None, scale: float) -> Tensor:
    rows = stats.sums.shape[1]
    out = stats.sums.new_empty(rows)
    if rows:
        block = launch.ROW_BLOCK
        launch.run(
            finish_kernel,
            triton.cdiv(rows, block),
            out.device,
            stats.sums.contiguous(),
            stats.flags.contiguous() if kind == "kl" else stats.sums,
            stats.sums if terms is None else terms,
            out,
            rows,
            scale,
            KIND=kind,
            BLOCK=block,
            num_warps=4,
        )
    return out


def finish_kl(stats: ShardStats) -> Tensor:
    """KL(A || B) = W / S_a + log(S_b / S_a) `[N]`, +inf outside B's support, NaN before that."""
    return _finish("kl", stats, None, 1.0)


def finish_terms(terms: Tensor, stats: ShardStats, scale: float) -> Tensor:
    """The first row of `terms` times `scale` `[N]`, NaN where a side does not exist."""
    return _finish("terms", stats, terms, scale)
