"""KL and JSD: two distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels import _stats
from vocabtp.kernels._autograd.function import Ctx, once, plain
from vocabtp.kernels._rows import as_rows
from vocabtp.kernels._spec import PairSpec
from vocabtp.kernels._stats import ShardStats


def _pair_scale(ctx: Ctx, grad: Tensor, stats: ShardStats) -> tuple[Tensor, Tensor]:
    """Upstream over T, NaN in rows with a NaN, and the rows whose gradient is exactly 0."""
    spec: PairSpec = ctx.spec
    return spec.implementation.pair_scale(grad.reshape(-1), stats, spec.scale / spec.temperature)


def _pair_outputs(ctx: Ctx, *inputs: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients to fill, None where nobody asks, and the same as `[N, L]`."""
    outs = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)
    ]
    rows = inputs[0].shape[:-1].numel()
    return outs, [None if out is None else out.view(rows, out.shape[-1]) for out in outs]


class KlDiv(torch.autograd.Function):
    """KL(A || B) of two sides' logits; the value is `[N]`."""

    @staticmethod
    def forward(ctx: Ctx, a: Tensor, b: Tensor, spec: PairSpec) -> Tensor:
        with plain(a.device):
            rows_a, rows_b = as_rows(a), as_rows(b)
            impl, temperature = spec.implementation, spec.temperature
            local = impl.kl_stats(rows_a, rows_b, spec.dtype(a, b), temperature)
            stats = _stats.exchanged(local, spec.exchange, _stats.merge_kl, temperature)
            if spec.clip is None:
                terms = None
                values = impl.finish_kl(stats)
            else:
                terms = impl.kl_terms(rows_a, rows_b, stats, temperature, spec.clip)
                terms = _stats.in_rank_order(spec.exchange.gather(terms))
                values = impl.finish_terms(terms, stats, 1.0)
        ctx.spec = spec
        ctx.save_for_backward(a, b, *stats, *([] if terms is None else [terms]))
        return values

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        spec: PairSpec = ctx.spec
        a, b, maxes, sums, flags, *terms = ctx.saved_tensors
        stats = ShardStats(maxes, sums, flags)
        (grad_a, grad_b), (out_a, out_b) = _pair_outputs(ctx, a, b)
        with plain(a.device):
            scale, skip = _pair_scale(ctx, grad, stats)
            spec.implementation.kl_grad(
                as_rows(a),
                as_rows(b),
                stats,
                terms[0] if terms else None,
                scale,
                skip,
                out_a,
                out_b,
                spec.temperature,
                spec.clip,
            )
        return grad_a, grad_b, None


class Jsd(torch.autograd.Function):
    """Generalized JSD for 0 < beta < 1; the value is `[N]`."""

    @staticmethod
    def forward(ctx: Ctx, student: Tensor, teacher: Tensor, spec: PairSpec) -> Tensor:
        with plain(student.device):
            p, q = as_rows(student), as_rows(teacher)
            impl, temperature = spec.implementation, spec.temperature
            local = impl.pair_stats(p, q, spec.dtype(student, teacher), temperature)
            stats = _stats.exchanged(local, spec.exchange, _stats.merge_softmax, temperature)
            terms = impl.jsd_terms(p, q, stats, temperature, spec.beta, spec.clip)
            terms = _stats.in_rank_order(spec.exchange.gather(terms))
            values = impl.finish_terms(terms, stats, spec.scale)
        ctx.spec = spec
        ctx.save_for_backward(student, teacher, *stats, terms)
        return values

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        spec: PairSpec = ctx.spec
        student, teacher, *parts, terms = ctx.saved_tensors
        stats = ShardStats(*parts)
        (grad_p, grad_q), (out_p, out_q) = _pair_outputs(ctx, student, teacher)
        with plain(student.device):
            scale, skip = _pair_scale(ctx, grad, stats)
            spec.implementation.jsd_grad(
                as_rows(student),
                as_rows(teacher),
                stats,
                terms,
                scale,
                skip,
                out_p,
                out_q,
                spec.temperature,
                spec.beta,
                spec.clip,
            )
        return grad_p, grad_q, None
