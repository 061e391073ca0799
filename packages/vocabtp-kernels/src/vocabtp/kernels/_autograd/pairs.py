"""KL and JSD: two distributions.

A forward returns the values and what its backward needs besides the logits, all of it `[*, N]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vocabtp.kernels import _stats
from vocabtp.kernels._autograd.function import Ctx, once, plain
from vocabtp.kernels._exchange import LOCAL
from vocabtp.kernels._rows import as_rows
from vocabtp.kernels._spec import PairSpec
from vocabtp.kernels._stats import ShardStats


def _pair_outputs(
    inputs: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients to fill, None where nobody asks, and the same as `[N, L]`."""
    outs = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        for x, needed in zip(inputs, needs, strict=True)
    ]
    rows = math.prod(inputs[0].shape[:-1])
    return outs, [None if out is None else out.view(rows, out.shape[-1]) for out in outs]


def kl_forward(a: Tensor, b: Tensor, spec: PairSpec) -> tuple[Tensor, list[Tensor]]:
    """KL(A || B) of two sides' logits; the value is `[N]`."""
    with plain(a.device):
        rows_a, rows_b = as_rows(a), as_rows(b)
        impl, temperature = spec.implementation, spec.temperature
        # one part a rank crosses the wire
        merged = spec.exchange is not LOCAL
        # nested, so that nothing keeps the parts of a row
        values, stats = impl.finish_kl(
            _stats.gather(
                impl.kl_stats(rows_a, rows_b, spec.dtype(a, b), temperature, merged=merged),
                spec.exchange,
            ),
            temperature,
        )
        if spec.clip is None:
            return values, [*stats]
        terms = impl.kl_terms(rows_a, rows_b, stats, temperature, spec.clip, merged=merged)
        terms = _stats.gather_terms(terms, spec.exchange)
        values, terms = impl.finish_terms(terms, stats, 1.0)
        return values, [*stats, terms]


def kl_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    saved: Sequence[Tensor],
    spec: PairSpec,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of `kl_forward` to the sides that need one."""
    maxes, sums, flags, *terms = saved
    stats = ShardStats(maxes, sums, flags)
    grads, (out_a, out_b) = _pair_outputs((a, b), needs)
    with plain(a.device):
        spec.implementation.kl_grad(
            as_rows(a),
            as_rows(b),
            stats,
            terms[0] if terms else None,
            grad.resolve_neg().reshape(-1),
            spec.scale / spec.temperature,
            out_a,
            out_b,
            spec.temperature,
            spec.clip,
        )
    return grads


def jsd_forward(student: Tensor, teacher: Tensor, spec: PairSpec) -> tuple[Tensor, list[Tensor]]:
    """Generalized JSD for 0 < beta < 1; the value is `[N]`."""
    with plain(student.device):
        p, q = as_rows(student), as_rows(teacher)
        impl, temperature = spec.implementation, spec.temperature
        merged = spec.exchange is not LOCAL
        stats = impl.merge_pair(
            _stats.gather(
                impl.pair_stats(p, q, spec.dtype(student, teacher), temperature, merged=merged),
                spec.exchange,
            ),
            temperature,
        )
        terms = impl.jsd_terms(p, q, stats, temperature, spec.beta, spec.clip, merged=merged)
        terms = _stats.gather_terms(terms, spec.exchange)
        values, terms = impl.finish_terms(terms, stats, spec.scale)
        return values, [*stats, terms]


def jsd_backward(
    grad: Tensor,
    student: Tensor,
    teacher: Tensor,
    saved: Sequence[Tensor],
    spec: PairSpec,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of `jsd_forward` to the sides that need one."""
    *parts, terms = saved
    stats = ShardStats(*parts)
    grads, (out_p, out_q) = _pair_outputs((student, teacher), needs)
    with plain(student.device):
        spec.implementation.jsd_grad(
            as_rows(student),
            as_rows(teacher),
            stats,
            terms,
            grad.resolve_neg().reshape(-1),
            spec.scale / spec.temperature,
            out_p,
            out_q,
            spec.temperature,
            spec.beta,
            spec.clip,
        )
    return grads


class KlDiv(torch.autograd.Function):
    """`kl_forward`, differentiable."""

    @staticmethod
    def forward(ctx: Ctx, a: Tensor, b: Tensor, spec: PairSpec) -> Tensor:
        values, saved = kl_forward(a, b, spec)
        ctx.spec = spec
        ctx.save_for_backward(a, b, *saved)
        return values

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *saved = ctx.saved_tensors
        return *kl_backward(grad, a, b, saved, ctx.spec, ctx.needs_input_grad[:2]), None


class Jsd(torch.autograd.Function):
    """`jsd_forward`, differentiable."""

    @staticmethod
    def forward(ctx: Ctx, student: Tensor, teacher: Tensor, spec: PairSpec) -> Tensor:
        values, saved = jsd_forward(student, teacher, spec)
        ctx.spec = spec
        ctx.save_for_backward(student, teacher, *saved)
        return values

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, q, *saved = ctx.saved_tensors
        return *jsd_backward(grad, p, q, saved, ctx.spec, ctx.needs_input_grad[:2]), None
