"""Log-probabilities and entropy: one distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels import _flags, _ids, _stats
from vocabtp.kernels._autograd.function import Ctx, once, plain
from vocabtp.kernels._exchange import LOCAL
from vocabtp.kernels._rows import Rows, as_id_rows, as_rows
from vocabtp.kernels._spec import TokenSpec
from vocabtp.kernels._stats import TokenValues


class Saved(NamedTuple):
    """What a backward needs: the inputs, and a few numbers a row."""

    logits: Tensor
    ids: Tensor | None  # [..., K]
    stats: Tensor  # [3 or 4, N]


def forward(
    logits: Tensor, ids: Tensor | None, spec: TokenSpec, *, entropy: bool
) -> tuple[TokenValues, Saved]:
    """Values for ids `[..., K]`, entropies or both, and what `backward` needs."""
    with plain(logits.device):
        rows, impl = as_rows(logits), spec.implementation
        id_rows = _id_rows(ids, rows)
        watch, report = None, None
        if id_rows.num_cols:
            report = _ids.Report(spec.name, tuple(logits.shape[:-1]), spec.bounds)
            if not spec.at_once or _flags.raised_by(logits.device):
                watch = _ids.Watch(report, logits.device)
        alone = spec.exchange is LOCAL
        stats, chosen = impl.token_stats(
            rows,
            id_rows,
            spec.bounds,
            spec.dtype(logits),
            spec.temperature,
            entropy=entropy,
            merged=not alone,
            watch=watch if alone else None,
        )
        stats = _stats.gather(stats, spec.exchange)
        if report is not None:
            if watch is None:
                _ids.report_now(stats.flags[:, 0], report)
            chosen = spec.exchange.sum(chosen)
        values = impl.finish_tokens(
            stats,
            chosen,
            id_rows,
            spec.bounds,
            spec.temperature,
            entropy=entropy,
            watch=None if alone else watch,
        )
        if watch is not None:
            watch.close(now=spec.at_once)
    return values, Saved(logits, ids, values.stats)


def _id_rows(ids: Tensor | None, logits: Rows) -> Rows:
    """`ids`, or none of each row."""
    if ids is None:
        ids = torch.empty(logits.num_rows, 0, dtype=torch.int64, device=logits.device)
    return as_id_rows(ids)


def backward(
    saved: Saved, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, spec: TokenSpec
) -> Tensor | None:
    """The gradient to the logits, in their dtype and contiguous; None if nobody asks."""
    if grad_logprobs is None and grad_entropy is None:
        return None
    logits, ids, stats = saved
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    with plain(logits.device):
        rows = as_rows(logits)
        spec.implementation.token_grad(
            rows,
            stats,
            _id_rows(None if grad_logprobs is None else ids, rows),
            spec.bounds,
            _resolved(grad_logprobs),
            _resolved(grad_entropy),
            out.view(stats.shape[1], logits.shape[-1]),
            spec.temperature,
        )
    return out


def _resolved(upstream: Tensor | None) -> Tensor | None:
    return None if upstream is None else upstream.resolve_neg()


def _keep(ctx: Ctx, saved: Saved, spec: TokenSpec) -> None:
    ctx.spec = spec
    ids = saved.ids
    if ids is not None and ids.is_inference() and ctx.needs_input_grad[0]:
        # autograd saves no tensor of inference mode, where ids are often drawn
        saved = saved._replace(ids=ids.clone())
    ctx.save_for_backward(*saved)  # type: ignore[arg-type] # None is one of them
    ctx.set_materialize_grads(False)


def _backward(ctx: Ctx, lp: Tensor | None, h: Tensor | None) -> Tensor | None:
    return (
        None if lp is None and h is None else backward(Saved(*ctx.saved_tensors), lp, h, ctx.spec)
    )


class Logprobs(torch.autograd.Function):
    """log p at `index` `[..., K]`; the value is `[N, K]`."""

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> Tensor:
        values, saved = forward(logits, index, spec, entropy=False)
        _keep(ctx, saved, spec)
        return values.logprobs

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return _backward(ctx, grad, None), None, None


class Entropy(torch.autograd.Function):
    """H of each row; the value is `[N]`."""

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, spec: TokenSpec) -> Tensor:
        values, saved = forward(logits, None, spec, entropy=True)
        _keep(ctx, saved, spec)
        assert values.entropies is not None
        return values.entropies

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return _backward(ctx, None, grad), None


class LogprobsAndEntropy(torch.autograd.Function):
    """Both from one read."""

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> tuple[Tensor, Tensor]:
        values, saved = forward(logits, index, spec, entropy=True)
        _keep(ctx, saved, spec)
        assert values.entropies is not None
        return values.logprobs, values.entropies

    @staticmethod
    @once
    def backward(
        ctx: Ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        return _backward(ctx, grad_logprobs, grad_entropy), None, None
