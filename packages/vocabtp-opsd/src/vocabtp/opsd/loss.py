"""From logits to the distillation loss: which rows count, on which route, divided by what.

    loss = T^2 * sum over counted rows of D(student_row / T, teacher_row / T) / normalizer

`D` is forward KL(q || p), reverse KL(p || q) or the generalized Jensen-Shannon divergence of the
student's p and the teacher's q. Rows are response tokens, `[rows, L]` packed or `[B, T, L]` under
a mask, and `L` is this rank's part of the vocabulary when a shard is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocabtp.cache import TeacherCache
from vocabtp.dist import VocabShard, agree
from vocabtp.opsd._arguments import check_types
from vocabtp.opsd._loss_spec import LossSpec
from vocabtp.opsd._masks import row_mask
from vocabtp.opsd._stream import ROW_METRICS, Stream, StreamedLoss, row_metrics
from vocabtp.opsd.config import DistillationConfig

__all__ = ["ROW_METRICS", "LossSpec", "distill_loss", "row_metrics"]


def distill_loss(
    student_logits: Tensor,
    teacher: Tensor | TeacherCache,
    response_mask: Tensor | None = None,
    config: DistillationConfig | LossSpec | None = None,
    shard: VocabShard | None = None,
    *,
    aligned: bool = False,
    normalizer: Tensor | float | None = None,
    collect: list[Tensor] | None = None,
    agreed: bool = False,
    **overrides: Any,
) -> Tensor:
    """The mean distillation loss of the response tokens, as the trainer optimises it.

    Args:
        student_logits: `[rows, L]` packed response rows, or `[B, T, L]` for every position; fp32,
            bf16, fp16 (or fp64, which stays fp64). Under tensor parallelism the columns that
            `shard` names.
        teacher: Logits, or a cache of them, of the student's shape and on the same columns; for a
            `[B, T, L]` student also packed rows `[rows, L]`, one per counted row.
        response_mask: Bool or integer. Packed rows: None, a mask of any shape that marks exactly
            `rows` tokens (all rows count), or a row mask `[rows]`. `[B, T, L]`: None (all
            positions count) or `[B, T]` marking response TOKENS, of which row `t - 1` scores
            token `t`.
        config: The `distillation` section; None for its defaults.
        shard: Which columns this rank holds. None means the whole vocabulary.
        aligned: The `[B, T]` mask marks rows of the logits instead of tokens: no shift.
        normalizer: What the sum over rows is divided by, equal on all ranks. None: the number of
            counted rows here. The trainer gives the tokens of the whole optimizer step.
        collect: Receives `[5, n]` (or `[5, B, n]`) fp32 for each chunk: `ROW_METRICS` of its
            rows, 0 where a row does not count. About doubles the cost of the loss.
        agreed: The ranks of the shard are known to call with equal shapes and options. By default
            they check it, with one small exchange.
        **overrides: Fields of the `distillation` section: loss_type, beta, rescale,
            pointwise_clip, temperature, temperature_squared, chunk_size, loss_backend.

    Returns:
        A scalar, fp32 (fp64 for fp64 logits), replicated over the tensor-parallel ranks. 0 when
        no row counts. Its backward fills the student's local gradient without communication.

    Raises:
        ValueError: Shapes or masks that do not fit; a mask that marks token 0, which no row
            scores; values out of range.
        TypeError: A floating-point mask, an unknown field.
    """
    stream, error = None, None
    try:
        spec = LossSpec.of(config, **overrides)
        check_types(student_logits, teacher, response_mask, shard, normalizer)
        student_logits, mask = _rows(student_logits, teacher, response_mask, aligned)
        _check_route(spec, student_logits, teacher, shard)
        stream = Stream(spec, teacher, mask, shard, normalizer, collect)
    except Exception as caught:  # whatever it is: peers wait for this rank's answer
        error = caught
    group = shard.tp_group if isinstance(shard, VocabShard) else None
    if group is not None and not agreed:
        # a rank that raised alone would leave its peers in the first exchange
        facts = {} if stream is None else stream.facts(student_logits)
        agree(facts, what="distill_loss", group=group, error=error)
    if error is not None:
        if type(error) in (TypeError, ValueError):
            raise type(error)(f"distill_loss: {error}") from error
        raise error
    loss: Tensor = StreamedLoss.apply(student_logits, stream)  # type: ignore[no-untyped-call]
    return loss


def _rows(
    student: Tensor, teacher: Tensor | TeacherCache, mask: Tensor | None, aligned: bool
) -> tuple[Tensor, Tensor | None]:
    """The student's rows in the teacher's form, and which of them count (None: all)."""
    counted = row_mask(student, mask, aligned)
    if student.ndim == 3 and len(teacher.shape) == 2:
        every = torch.ones(student.shape[:-1], dtype=torch.bool, device=student.device)
        student, counted = student[every if counted is None else counted], None
    if tuple(teacher.shape) != tuple(student.shape):
        raise ValueError(
            f"student and teacher must have the same rows and columns, "
            f"got {list(student.shape)} and {list(teacher.shape)}"
        )
    return student, counted


def _check_route(
    spec: LossSpec,
    student: Tensor,
    teacher: Tensor | TeacherCache,
    shard: VocabShard | None,
) -> None:
    if shard is None:
        kept = teacher.shard if isinstance(teacher, TeacherCache) else None
        if kept is not None and kept.width != kept.global_size:
            # a softmax over these columns alone would look like a distribution
            raise ValueError(
                f"the teacher holds columns {kept.start} to {kept.end} of {kept.global_size}: pass "
                "shard, the columns of the student's logits"
            )
        return
    if student.shape[-1] != shard.width:
        raise ValueError(
            f"the logits must have the {shard.width} columns {shard.start} to {shard.end} of the "
            f"shard, got {list(student.shape)}"
        )
    if spec.loss_backend == "dense" and shard.width != shard.global_size:
        raise ValueError(
            f"loss_backend dense needs whole heads, got columns {shard.start} to {shard.end} of "
            f"{shard.global_size}; use vocab_parallel or gathered"
        )
    if isinstance(teacher, TeacherCache) and teacher.shard not in (None, shard):
        raise ValueError(
            f"the teacher was stored for another shard than columns {shard.start} to {shard.end} "
            f"of {shard.global_size}: store its logits with the student's shard"
        )
