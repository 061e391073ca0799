"""The chunk loop of the loss, as one autograd node.

A chunk's values and its student gradient are formed before the next chunk of the teacher arrives,
so that of the teacher one chunk, and those that its cache may prefetch, are on the device, whatever
the number of rows. A row's value and gradient do not depend on its neighbours and the values are
summed once, at the end: the chunk size is bitwise neutral.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocabtp.cache import TeacherCache
from vocabtp.dist import (
    VocabShard,
    gather_vocab,
    vocab_parallel_argmax,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
)
from vocabtp.opsd._loss_spec import LossSpec

ROW_METRICS = ("reverse_kl", "forward_kl", "student_entropy", "teacher_entropy", "top1_agreement")


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

    Costs six more exchanges and as many reads of the logits, about what the loss and its gradient
    cost; beside the models' own passes that is little, and the trainer asks for it at every step.

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


class Stream:
    """The chunk loop: rows of a packed input, positions of a `[B, T, L]` one."""

    def __init__(
        self,
        spec: LossSpec,
        teacher: Tensor | TeacherCache,
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

    def facts(self, student: Tensor) -> dict[str, object]:
        """What the ranks compare before the first exchange."""
        dtypes = f"{student.dtype}, {self.teacher.dtype}".replace("torch.", "")
        return {"rows": self.rows(student), "dtype": dtypes, "loss": self.spec}

    def run(self, student: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
        """The loss and, if asked for, its gradient with respect to `student`."""
        dim = student.ndim - 2
        total = student.shape[dim]
        # chunk_size counts rows; a position of a [B, T, L] input is B rows
        step = max(1, self.spec.chunk_size // (student.shape[0] if dim else 1))
        spans = [(a, min(a + step, total)) for a in range(0, total, step)]
        fetch = self._reader(student, total, step)
        grad = torch.empty_like(student, memory_format=torch.contiguous_format)
        weight = self._weight(student)
        values = []
        for a, b in spans:
            rows = student.narrow(dim, a, b - a).requires_grad_(with_grad)
            teacher = fetch(a, b)
            with torch.set_grad_enabled(with_grad):
                value = row_values(rows, teacher, self.spec, self.shard)
            if with_grad:
                (part,) = torch.autograd.grad(value, rows, weight.narrow(dim, a, b - a))
                grad.narrow(dim, a, b - a).copy_(part)
            if self.collect is not None:
                self._observe(rows.detach(), teacher, a, b)
            values.append(value.detach())
            # before the next one: its room is then free
            del teacher
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

    def _reader(self, student: Tensor, total: int, step: int) -> Callable[[int, int], Tensor]:
        teacher, device, dim = self.teacher, student.device, student.ndim - 2
        if isinstance(teacher, Tensor):
            logits = teacher.detach()
            return lambda a, b: logits.narrow(dim, a, b - a).to(device)
        # a cache that was not told its shard cannot compare
        known = None if teacher.shard is None else self.shard
        teacher.prefetch(0, total, device=device, chunk=step)
        return lambda a, b: teacher.fetch(a, b, device=device, shard=known)


class StreamedLoss(torch.autograd.Function):
    """`apply(student, stream)` is the loss of the whole stream, its gradient formed on the way."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, stream: Stream) -> Tensor:
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
