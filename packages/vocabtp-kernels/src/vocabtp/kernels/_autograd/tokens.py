"""Log-probabilities and entropy: one distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.kernels import _ids, _stats
from vocabtp.kernels._autograd.function import Ctx, once, plain
from vocabtp.kernels._exchange import LOCAL
from vocabtp.kernels._rows import as_rows
from vocabtp.kernels._spec import TokenSpec
from vocabtp.kernels._stats import NAN, ShardStats


def _token_forward(
    ctx: Ctx, logits: Tensor, ids: Tensor, spec: TokenSpec, *, entropy: bool
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
    ctx: Ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor | None:
    if grad_logprobs is None and grad_entropy is None:
        return None
    spec: TokenSpec = ctx.spec
    logits, columns, maxes, sums = ctx.saved_tensors
    stats = ShardStats(maxes, sums, sums[:0])
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    with plain(logits.device):
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
    def forward(ctx: Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> Tensor:
        with plain(logits.device):
            stats, chosen, columns = _token_forward(ctx, logits, index, spec, entropy=False)
            return _token_values(stats, chosen, columns, spec.temperature)

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return _token_backward(ctx, grad, None), None, None


class Entropy(torch.autograd.Function):
    """H of each row; the value is `[N]`."""

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, spec: TokenSpec) -> Tensor:
        with plain(logits.device):
            rows = logits.shape[:-1].numel()
            none = torch.empty(rows, 0, dtype=torch.int64, device=logits.device)
            stats, _, _ = _token_forward(ctx, logits, none, spec, entropy=True)
            return spec.implementation.finish_entropy(stats)

    @staticmethod
    @once
    def backward(ctx: Ctx, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return _token_backward(ctx, None, grad), None


class LogprobsAndEntropy(torch.autograd.Function):
    """Both from one read."""

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, index: Tensor, spec: TokenSpec) -> tuple[Tensor, Tensor]:
        with plain(logits.device):
            stats, chosen, columns = _token_forward(ctx, logits, index, spec, entropy=True)
            values = _token_values(stats, chosen, columns, spec.temperature)
            return values, spec.implementation.finish_entropy(stats)

    @staticmethod
    @once
    def backward(
        ctx: Ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        return _token_backward(ctx, grad_logprobs, grad_entropy), None, None
