"""One autograd.Function an op: statistics, one exchange, merge in rank order, finish.

Every forward reads the shard (`stats`), lets all ranks see all statistics (`exchange.gather`) and
finishes the value from the merged ones. The backward reads the shard once more, needs no exchange,
and assumes that every rank back-propagates the same upstream gradient. `ctx` holds the inputs and
`[*, N]` statistics, never an output (the caller may mask it in place) and nothing of `[N, L]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from vocabtp.kernels import _ids, _stats
from vocabtp.kernels._exchange import LOCAL
from vocabtp.kernels._rows import as_rows
from vocabtp.kernels._spec import PairSpec, TokenSpec
from vocabtp.kernels._stats import NAN, ShardStats


class _Ctx(FunctionCtx):
    spec: Any
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _NoSecond(torch.autograd.Function):
    """Passes a gradient on, and raises when somebody differentiates it."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "vocabtp.kernels: gradients of these ops cannot be differentiated again; "
            "create_graph=True has no use here"
        )


def _once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run a backward without a graph; differentiating its result raises.

    torch's `once_differentiable` lets the result pass as a constant where the upstream gradient is
    one, so that a gradient penalty would silently train on nothing.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            grads = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return grads
        return tuple(
            call(_NoSecond, g.requires_grad_()) if isinstance(g, Tensor) else g for g in grads
        )

    return wrapped


def call(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _plain(device: torch.device) -> torch.autocast:
    """No autocast: the dtypes here are chosen."""
    return torch.autocast(device.type, enabled=False)


def _token_forward(
    ctx: _Ctx, logits: Tensor, ids: Tensor, spec: TokenSpec, *, entropy: bool
) -> tuple[ShardStats, Tensor, Tensor]:
    """Merged statistics, the chosen logits of all ranks and the columns, both `[N, K]`."""
    dtype, rows = spec.dtype(logits), as_rows(logits)
    columns, bad = _ids.resolve(
        ids, spec.ignore_index, spec.vocab_start, rows.num_cols, spec.vocab_size, dtype
    )
    impl = spec.implementation
    local, chosen = impl.token_stats(rows, columns, dtype, spec.temperature, entropy=entropy)
    if spec.exchange is LOCAL:
        stats, codes = local._replace(flags=bad), bad
    else:
        gathered = _stats.gather(local._replace(flags=bad), spec.exchange)
        stats, codes = _stats.merge_softmax(gathered, spec.temperature), gathered.flags[:, 0]
    if columns.shape[1]:
        report = _ids.Report(
            spec.name, tuple(logits.shape[:-1]), spec.ignore_index, spec.vocab_size
        )
        later = _ids.report_now if spec.at_once else _ids.report_later
        later(codes, report)
        chosen = spec.exchange.sum(chosen)
        anywhere = (stats.flags[0] != 0)[:, None] & (columns != _ids.IGNORED)
        columns = columns.masked_fill(anywhere, _ids.BAD)
    ctx.spec = spec
    ctx.save_for_backward(logits, columns, stats.maxes, stats.sums)
    ctx.set_materialize_grads(False)
    return stats, chosen, columns


def _token_values(stats: ShardStats, chosen: Tensor, columns: Tensor, temperature: float) -> Tensor:
    values = _stats.finish_logprobs(stats, chosen, temperature)
    values = values.masked_fill(columns == _ids.BAD, NAN)
    return values.masked_fill(columns == _ids.IGNORED, 0.0)


def _token_backward(
    ctx: _Ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor | None:
    if grad_logprobs is None and grad_entropy is None:
        return None
    spec: TokenSpec = ctx.spec
    logits, columns, maxes, sums = ctx.saved_tensors
    stats = ShardStats(maxes, sums, sums[:0])
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    with _plain(logits.device):
        idle = torch.ones_like(sums[0], dtype=torch.bool)
        if grad_logprobs is None:
            columns = columns[:, :0]
            weights = sums.new_zeros(sums.shape[1], 0)
        else:
            upstream = grad_logprobs.reshape(columns.shape).masked_fill(columns == _ids.IGNORED, 0)
            idle &= (upstream == 0).all(1)
            # a bad id anywhere on the row is a NaN there, wherever its gradient is not 0
            weights = (upstream / spec.temperature).masked_fill(
                (columns == _ids.BAD) & (upstream != 0), NAN
            )
        entropy_weight = None
        if grad_entropy is not None:
            entropy_weight = grad_entropy.reshape(-1) / spec.temperature
            idle &= entropy_weight == 0
        skip = idle | _stats.undefined(stats, 1)
        spec.implementation.token_grad(
            as_rows(logits),
            stats,
            columns,
            weights,
            entropy_weight,
            skip,
            out.view(skip.shape[0], logits.shape[-1]),
            spec.temperature,
        )
    return out


class Logprobs(torch.autograd.Function):
    """log p at `index` `[N, K]`; the value is `[N, K]`."""

    @staticmethod
    def forward(ctx: _Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> Tensor:
        with _plain(logits.device):
            stats, chosen, columns = _token_forward(ctx, logits, index, spec, entropy=False)
            return _token_values(stats, chosen, columns, spec.temperature)

    @staticmethod
    @_once
    def backward(ctx: _Ctx, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return _token_backward(ctx, grad, None), None, None


class Entropy(torch.autograd.Function):
    """H of each row; the value is `[N]`."""

    @staticmethod
    def forward(ctx: _Ctx, logits: Tensor, spec: TokenSpec) -> Tensor:
        with _plain(logits.device):
            rows = logits.shape[:-1].numel()
            none = torch.empty(rows, 0, dtype=torch.int64, device=logits.device)
            stats, _, _ = _token_forward(ctx, logits, none, spec, entropy=True)
            return spec.implementation.finish_entropy(stats)

    @staticmethod
    @_once
    def backward(ctx: _Ctx, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return _token_backward(ctx, None, grad), None


class LogprobsAndEntropy(torch.autograd.Function):
    """Both from one read."""

    @staticmethod
    def forward(ctx: _Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> tuple[Tensor, Tensor]:
        with _plain(logits.device):
            stats, chosen, columns = _token_forward(ctx, logits, index, spec, entropy=True)
            values = _token_values(stats, chosen, columns, spec.temperature)
            return values, spec.implementation.finish_entropy(stats)

    @staticmethod
    @_once
    def backward(
        ctx: _Ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        return _token_backward(ctx, grad_logprobs, grad_entropy), None, None


def _pair_scale(ctx: _Ctx, grad: Tensor, stats: ShardStats) -> tuple[Tensor, Tensor]:
    """Upstream over T, NaN in rows with a NaN, and the rows whose gradient is exactly 0."""
    spec: PairSpec = ctx.spec
    return spec.implementation.pair_scale(grad.reshape(-1), stats, spec.scale / spec.temperature)


def _pair_outputs(ctx: _Ctx, *inputs: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
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
    def forward(ctx: _Ctx, a: Tensor, b: Tensor, spec: PairSpec) -> Tensor:
        with _plain(a.device):
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
    @_once
    def backward(ctx: _Ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        spec: PairSpec = ctx.spec
        a, b, maxes, sums, flags, *terms = ctx.saved_tensors
        stats = ShardStats(maxes, sums, flags)
        (grad_a, grad_b), (out_a, out_b) = _pair_outputs(ctx, a, b)
        with _plain(a.device):
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
    def forward(ctx: _Ctx, student: Tensor, teacher: Tensor, spec: PairSpec) -> Tensor:
        with _plain(student.device):
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
    @_once
    def backward(ctx: _Ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        spec: PairSpec = ctx.spec
        student, teacher, *parts, terms = ctx.saved_tensors
        stats = ShardStats(*parts)
        (grad_p, grad_q), (out_p, out_q) = _pair_outputs(ctx, student, teacher)
        with _plain(student.device):
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
