"""The whole vocabulary on every rank: the dense route that the sharded ops are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocabtp.dist._inputs import whole_or_shard
from vocabtp.dist.agreement import disagreement, exchange_records
from vocabtp.dist.collectives import all_gather, group_size
from vocabtp.dist.shard import VocabShard, bounds_of, tiling_problem


def gather_vocab(vocab_parallel_logits: Tensor, shard: VocabShard | None = None) -> Tensor:
    """All columns on every rank; the gradient is this rank's slice of the upstream gradient.

    The reference route: memory and traffic are those of the whole vocabulary. The backward assumes,
    like every op here, that all ranks back-propagate the same loss, and needs no collective. Two
    all_gathers: one small one that checks rows, dtypes and bounds of all ranks and tells their
    widths, and the logits, padded to the widest shard.

    Args:
        vocab_parallel_logits: `[..., L]`, this rank's columns, or a DTensor sharded on the last
            dimension.
        shard: which columns they are; None is the whole vocabulary (a DTensor brings its own).

    Returns:
        `[..., V]` of the same dtype; without a group the tensor itself.

    Raises:
        ValueError: on every rank, if rows, dtypes or bounds of the ranks do not fit together.
        TypeError: the logits are not a floating-point tensor.
    """
    group = shard.tp_group if isinstance(shard, VocabShard) else None
    facts: dict[str, object] = {"op": "gather_vocab"}
    error: Exception | None = None
    try:
        local, shard = whole_or_shard("gather_vocab", vocab_parallel_logits, shard, empty=True)
        group = shard.tp_group
        facts |= {
            "leading shape": list(local.shape[:-1]),
            "dtype": str(local.dtype),
            **shard.facts(),
        }
    except Exception as raised:  # whatever it is: peers wait for this rank's answer
        if group_size(group) == 1:
            raise
        error = raised
    if group_size(group) == 1:
        return local
    text = None if error is None else str(error).removeprefix("gather_vocab: ")
    records = exchange_records(facts, group=group, error=text)
    shared = ("op", "leading shape", "dtype")
    if problem := disagreement(records, only=shared) or tiling_problem(records):
        raise ValueError(f"{records[0].facts['op']}: {problem}")
    widths = [end - start for start, end in bounds_of(records)]
    out: Tensor = _GatherVocab.apply(local, shard, widths)  # type: ignore[no-untyped-call]
    return out


class _GatherVocab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard, widths: list[int]) -> Tensor:
        ctx.shard = shard
        padded = local.new_zeros(*local.shape[:-1], max(widths))
        padded[..., : shard.width] = local
        pieces = all_gather(padded, shard.tp_group)
        return torch.cat(
            [piece[..., :width] for piece, width in zip(pieces, widths, strict=True)], -1
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # a copy: a view would keep the whole vocabulary's gradient alive
        return grad[..., ctx.shard.start : ctx.shard.end].contiguous(), None, None
