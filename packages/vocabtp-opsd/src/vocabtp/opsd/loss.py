"""From logits to the distillation loss: which rows count, in chunks, as one autograd node.

    loss = T^2 * sum over counted rows of D(student_row / T, teacher_row / T) / normalizer

`D` is forward KL(q || p), reverse KL(p || q) or the generalized Jensen-Shannon divergence of the
student's p and the teacher's q. Rows are response tokens, `[rows, L]` packed or `[B, T, L]` under
a mask, and `L` is this rank's part of the vocabulary when a shard is given.

The chunk loop is one `autograd.Function`. A chunk's values and its student gradient are formed
before the next chunk of the teacher arrives, so that one chunk of the teacher (and the one that
is on its way) is on the device, whatever the number of rows. A row's value and gradient do not
depend on its neighbours and the values are summed once, at the end: the chunk size is bitwise
neutral.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import (
    VocabShard,
    agree,
    gather_vocab,
    vocab_parallel_argmax,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
)
from vocabtp.opsd._masks import row_mask
from vocabtp.opsd.config import DistillationConfig

LossType = Literal["reverse_kl", "forward_kl", "jsd"]
Backend = Literal["vocab_parallel", "gathered", "dense"]

ROW_METRICS = ("reverse_kl", "forward_kl", "student_entropy", "teacher_entropy", "top1_agreement")


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What is optimised: the part of `distillation` that the loss reads."""

    loss_type: LossType
    beta: float
    rescale: bool
    pointwise_clip: float | None
    temperature: float
    temperature_squared: bool
    chunk_size: int
    loss_backend: Backend

    def __post_init__(self) -> None:
        if self.loss_type not in get_args(LossType):
            raise ValueError(
                f"loss_type must be one of {', '.join(get_args(LossType))}, got {self.loss_type!r}"
            )
        if self.loss_backend not in get_args(Backend):
            raise ValueError(
                f"loss_backend must be one of {', '.join(get_args(Backend))}, "
                f"got {self.loss_backend!r}"
            )
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        # `not >` also refuses NaN
        if not self.temperature > 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature must be a finite number > 0, got {self.temperature}")

    @property
    def scale(self) -> float:
        """The factor that keeps gradients comparable over temperatures."""
        return self.temperature**2 if self.temperature_squared else 1.0

    @classmethod
    def of(cls, config: DistillationConfig | LossSpec | None, **overrides: Any) -> LossSpec:
        """The spec of a configuration, or of its defaults, with fields replaced.

        Args:
            config: A `distillation` section; None for its defaults.
            **overrides: Fields by name. `beta` without a configuration means `jsd`.

        Raises:
            TypeError: An unknown field.
            ValueError: A value out of range, or a beta that the loss type would not read.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(overrides) - set(names)):
            raise TypeError(f"unknown argument {unknown[0]!r}; the loss takes {', '.join(names)}")
        if config is None and "beta" in overrides:
            overrides.setdefault("loss_type", "jsd")
        base = DistillationConfig() if config is None else config
        values = {name: getattr(base, name) for name in names} | overrides
        if "beta" in overrides and values["loss_type"] != "jsd":
            raise ValueError(
                f"beta belongs to loss_type jsd, but loss_type is "
                f"{values['loss_type']}; leave beta out or set loss_type"
            )
        return cls(**values)


def distill_loss(
    student_logits: Tensor,
    teacher: Tensor | TeacherLogitCache,
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
        student_logits, mask = _rows(student_logits, teacher, response_mask, aligned)
        _check_route(spec, student_logits, teacher, shard)
        stream = _Stream(spec, teacher, mask, shard, normalizer, collect)
    except (TypeError, ValueError) as caught:
        error = caught
    group = None if shard is None else shard.tp_group
    if group is not None and not agreed:
        # a rank that raised alone would leave its peers in the first exchange
        facts = {} if stream is None else {"rows": stream.rows(student_logits), "loss": stream.spec}
        agree(facts, what="distill_loss", group=group, error=error)
    if error is not None:
        raise type(error)(f"distill_loss: {error}") from error
    loss: Tensor = _StreamedLoss.apply(student_logits, stream)  # type: ignore[no-untyped-call]
    return loss


def _rows(
    student: Tensor, teacher: Tensor | TeacherLogitCache, mask: Tensor | None, aligned: bool
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
    teacher: Tensor | TeacherLogitCache,
    shard: VocabShard | None,
) -> None:
    if shard is None:
        kept = teacher.shard if isinstance(teacher, TeacherLogitCache) else None
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
    if isinstance(teacher, TeacherLogitCache) and teacher.shard not in (None, shard):
        raise ValueError(
            f"the teacher was stored for another shard than columns {shard.start} to {shard.end} "
            f"of {shard.global_size}: store its logits with the student's shard"
        )


def row_values(
    student: Tensor, teacher: Tensor, spec: LossSpec, shard: VocabShard | None
) -> Tensor:
    """The divergence of each row, without the T^2 factor.

    Args:
        student: `[..., L]`.
        teacher: `[..., L]`, any of the dtypes that `student` may have.
        spec: Loss type, temperature and route.
        shard: This rank's columns; None for the whole vocabulary.

    Returns:
        `[...]` fp32 (fp64 for fp64), replicated.
    """
    if shard is not None and spec.loss_backend == "gathered":
        student, teacher, shard = gather_vocab(student, shard), gather_vocab(teacher, shard), None
    options: dict[str, Any] = {
        "shard": shard,
        "pointwise_clip": spec.pointwise_clip,
        "temperature": spec.temperature,
    }
    if spec.loss_type == "jsd":
        return vocab_parallel_jsd(student, teacher, beta=spec.beta, rescale=spec.rescale, **options)
    return vocab_parallel_kl_div(
        student, teacher, reverse=spec.loss_type == "reverse_kl", **options
    )


@torch.no_grad()
def row_metrics(student: Tensor, teacher: Tensor, shard: VocabShard | None = None) -> Tensor:
    """What is worth watching in each row, at temperature 1 whatever the loss uses.

    Costs six more exchanges and as many reads of the logits; the trainer asks for it on the steps
    that are logged.

    Args:
        student: `[..., L]`.
        teacher: `[..., L]`.
        shard: This rank's columns; None for the whole vocabulary.

    Returns:
        `[5, ...]` fp32 in the order of `ROW_METRICS`, replicated.
    """
    whole = shard or VocabShard(0, student.shape[-1], student.shape[-1], None)
    same = vocab_parallel_argmax(student, whole) == vocab_parallel_argmax(teacher, whole)
    return torch.stack(
        [
            vocab_parallel_kl_div(student, teacher, reverse=True, shard=shard).float(),
            vocab_parallel_kl_div(student, teacher, reverse=False, shard=shard).float(),
            vocab_parallel_entropy(student, shard=shard).float(),
            vocab_parallel_entropy(teacher, shard=shard).float(),
            same.float(),
        ]
    )


class _Stream:
    """The chunk loop: rows of a packed input, positions of a `[B, T, L]` one."""

    def __init__(
        self,
        spec: LossSpec,
        teacher: Tensor | TeacherLogitCache,
        mask: Tensor | None,
        shard: VocabShard | None,
        normalizer: Tensor | float | None,
        collect: list[Tensor] | None,
    ) -> None:
        self.spec, self.teacher, self.mask, self.shard = spec, teacher, mask, shard
        self.normalizer, self.collect = normalizer, collect

    def rows(self, student: Tensor) -> list[int]:
        """What the ranks of a shard must have alike: leading sizes and counted rows."""
        counted = [] if self.mask is None else [int(self.mask.sum())]
        return [*student.shape[:-1], *counted]

    def run(self, student: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
        """The loss and, if asked for, its gradient with respect to `student`."""
        dim = student.ndim - 2
        total = student.shape[dim]
        # chunk_size counts rows; a position of a [B, T, L] input is B rows
        step = max(1, self.spec.chunk_size // (student.shape[0] if dim else 1))
        spans = [(a, min(a + step, total)) for a in range(0, total, step)]
        fetch, prefetch = self._reader(student)
        grad = torch.empty_like(student, memory_format=torch.contiguous_format)
        weight = self._weight(student)
        values = []
        for i, (a, b) in enumerate(spans):
            rows = student.narrow(dim, a, b - a).requires_grad_(with_grad)
            teacher = fetch(a, b)
            if i + 1 < len(spans):
                prefetch(*spans[i + 1])
            with torch.set_grad_enabled(with_grad):
                value = row_values(rows, teacher, self.spec, self.shard)
            if with_grad:
                (part,) = torch.autograd.grad(value, rows, weight.narrow(dim, a, b - a))
                grad.narrow(dim, a, b - a).copy_(part)
            if self.collect is not None:
                self._observe(rows.detach(), teacher, a, b)
            values.append(value.detach())
        return self._sum(values, student, dim), grad if with_grad else None

    def _weight(self, student: Tensor) -> Tensor:
        """What each row's value is multiplied by; 0 keeps a row out, whatever it holds."""
        dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
        one = torch.ones(student.shape[:-1], dtype=dtype, device=student.device)
        if self.mask is not None:
            one = one * self.mask
        return one * self._factor(one)

    def _factor(self, rows: Tensor) -> Tensor | float:
        if self.normalizer is not None:
            return self.spec.scale / self.normalizer
        if self.mask is None:
            return self.spec.scale / max(1, rows.numel())
        return self.spec.scale / self.mask.sum().clamp(min=1)

    def _sum(self, values: list[Tensor], student: Tensor, dim: int) -> Tensor:
        if not values:
            return torch.zeros((), dtype=torch.float32, device=student.device)
        rows = torch.cat(values, dim)
        if self.mask is not None:
            # a row that does not count may hold inf, and 0 * inf would be NaN
            rows = torch.where(self.mask, rows, 0)
        return rows.sum() * self._factor(rows)

    def _observe(self, student: Tensor, teacher: Tensor, a: int, b: int) -> None:
        found = row_metrics(student, teacher, self.shard)
        if self.mask is not None:
            found = torch.where(self.mask[..., a:b], found, 0)
        assert self.collect is not None
        self.collect.append(found)

    def _reader(
        self, student: Tensor
    ) -> tuple[Callable[[int, int], Tensor], Callable[[int, int], None]]:
        teacher, device, dim = self.teacher, student.device, student.ndim - 2
        if isinstance(teacher, Tensor):
            logits = teacher.detach()
            return (
                lambda a, b: logits.narrow(dim, a, b - a).to(device),
                lambda a, b: None,
            )
        # a cache that was not told its shard cannot compare
        known = None if teacher.shard is None else self.shard
        return (
            lambda a, b: teacher.fetch(a, b, device=device, shard=known),
            lambda a, b: teacher.prefetch(a, b, device=device),
        )


class _StreamedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, stream: _Stream) -> Tensor:
        loss, grad = stream.run(student.detach(), ctx.needs_input_grad[0])
        if grad is not None:
            ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        # loss.backward() hands over exactly 1: a second [rows, L] is then not needed
        if bool(upstream == 1):
            return grad, None
        # 0 times a row that is not finite would be NaN
        return torch.where(upstream == 0, 0, grad * upstream), None
