"""What `_stats` does to `[N]` statistics, one launch each: few rows are bound by launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import launch
from vocabtp.kernels._triton.online import INF


@triton.jit
def _nan_unless_defined(value, s_a, s_b):
    defined = (s_a == s_a) & (s_b == s_b) & (s_a != 0.0) & (s_b != 0.0)
    return tl.where(defined, value, float("nan"))


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    sum_ptr, flag_ptr, terms_ptr, out_ptr, rows, scale, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    s_a = tl.load(sum_ptr + row, mask=live, other=1.0)
    second = tl.load(sum_ptr + rows + row, mask=live, other=1.0)
    if KIND == "entropy":
        value = tl.log(s_a) - second / s_a
    elif KIND == "kl":
        weighted = tl.load(sum_ptr + 2 * rows + row, mask=live, other=0.0)
        value = weighted / s_a + tl.log(second / s_a)
        flag = tl.load(flag_ptr + row, mask=live, other=0.0)
        value = _nan_unless_defined(tl.where(flag != 0.0, INF, value), s_a, second)
    else:
        term = tl.load(terms_ptr + row, mask=live, other=0.0)
        value = _nan_unless_defined(term * scale, s_a, second)
    tl.store(out_ptr + row, value, mask=live)


def _finish(kind: str, stats: ShardStats, terms: Tensor | None, scale: float) -> Tensor:
    rows = stats.sums.shape[1]
    out = stats.sums.new_empty(rows)
    if rows:
        block = launch.row_block(rows)
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


def finish_entropy(stats: ShardStats) -> Tensor:
    """H = log S - W / S `[N]`; 0 / 0 makes an undefined row NaN."""
    return _finish("entropy", stats, None, 1.0)


def finish_kl(stats: ShardStats) -> Tensor:
    """KL(A || B) = W / S_a + log(S_b / S_a) `[N]`, +inf outside B's support, NaN before that."""
    return _finish("kl", stats, None, 1.0)


def finish_terms(terms: Tensor, stats: ShardStats, scale: float) -> Tensor:
    """The first row of `terms` times `scale` `[N]`, NaN where a side does not exist."""
    return _finish("terms", stats, terms, scale)


@triton.jit(do_not_specialize=["rows", "stride"])
def pair_scale_kernel(
    grad_ptr, sum_ptr, scale_ptr, skip_ptr, rows, stride, factor, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    grad = tl.load(grad_ptr + row.to(tl.int64) * stride, mask=live, other=0.0)
    s_a = tl.load(sum_ptr + row, mask=live, other=1.0)
    s_b = tl.load(sum_ptr + rows + row, mask=live, other=1.0)
    poisoned = (s_a != s_a) | (s_b != s_b)
    tl.store(scale_ptr + row, tl.where(poisoned, float("nan"), grad * factor), mask=live)
    skip = (grad == 0.0) | (s_a == 0.0) | (s_b == 0.0)
    tl.store(skip_ptr + row, skip.to(tl.int8), mask=live)


def pair_scale(upstream: Tensor, stats: ShardStats, factor: float) -> tuple[Tensor, Tensor]:
    """`[N]` upstream times `factor`, NaN in rows with a NaN, and the rows of gradient 0."""
    rows = upstream.shape[0]
    scale = stats.sums.new_empty(rows)
    skip = torch.empty(rows, dtype=torch.int8, device=scale.device)
    if rows:
        block = launch.row_block(rows)
        launch.run(
            pair_scale_kernel,
            triton.cdiv(rows, block),
            scale.device,
            upstream,
            stats.sums.contiguous(),
            scale,
            skip,
            rows,
            upstream.stride(0),
            factor,
            BLOCK=block,
            num_warps=4,
        )
    return scale, skip
