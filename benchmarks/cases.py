"""What is measured: each op of vocabtp.kernels beside the same formula in dense PyTorch.

Letters: N rows, L columns, K ids a row; p is the student's distribution, q the teacher's. A pass is
one read or one write of an `[N, L]` tensor; the passes of a case are those that no implementation
without a row's logits on the chip can avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import vocabtp.kernels as vk
from vocabtp.kernels import reference

Values = Tensor | tuple[Tensor, ...]
Op = Callable[..., Values]

# the forward alone; with the student's gradient, the teacher frozen; with both gradients
MODES = ("forward", "train", "train_both")


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def dense_logprobs(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities of chosen tokens, as written with torch alone."""
    ids = index if index.dim() == logits.dim() else index[:, None]
    return _log_softmax(logits).gather(-1, ids).view(index.shape)


def dense_entropy(logits: Tensor) -> Tensor:
    """Entropy, as written with torch alone."""
    log_p = _log_softmax(logits)
    return -(log_p.exp() * log_p).sum(-1)


def dense_logprobs_and_entropy(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Both from one log-softmax, as written with torch alone."""
    log_p = _log_softmax(logits)
    return log_p.gather(-1, index[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def dense_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher), as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def dense_forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def dense_jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Generalized Jensen-Shannon divergence, as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * q + (1 - beta) * p).log()
    to_p, to_q = (p * (log_p - log_m)).sum(-1), (q * (log_q - log_m)).sum(-1)
    return beta * to_q + (1 - beta) * to_p


@dataclass(frozen=True)
class Case:
    """One op: its arms of our own, its fp64 truth, and the passes that it cannot avoid."""

    sides: int  # logits tensors that it takes
    ids: int  # ids a row: 0 for an op without, 1 for `[N]`, else `[N, K]`
    ours: Op
    dense: Op
    truth: Op
    reads: int  # passes of the forward
    writes: int  # passes that the backward adds for the student's gradient
    options: Mapping[str, object] = field(default_factory=dict)  # of the truth

    @property
    def modes(self) -> tuple[str, ...]:
        """What can be measured of it."""
        return MODES if self.sides == 2 else MODES[:2]

    def passes(self, mode: str) -> int:
        """Reads and writes of `[N, L]` in one call; a teacher's gradient is one more write."""
        return (
            self.reads + {"forward": 0, "train": self.writes, "train_both": self.writes + 1}[mode]
        )


_reverse_kl = partial(vk.kl_div, reverse=True)

CASES = {
    "reverse_kl": Case(
        2, 0, _reverse_kl, dense_reverse_kl, reference.kl_div, 2, 3, {"reverse": True}
    ),
    "forward_kl": Case(2, 0, vk.kl_div, dense_forward_kl, reference.kl_div, 2, 3),
    "jsd": Case(2, 0, vk.jsd, dense_jsd, reference.jsd, 4, 3),
    "entropy": Case(1, 0, vk.entropy, dense_entropy, reference.entropy, 1, 2),
    "logprobs": Case(1, 1, vk.logprobs, dense_logprobs, reference.logprobs, 1, 2),
    "logprobs_k256": Case(1, 256, vk.logprobs, dense_logprobs, reference.logprobs, 1, 2),
    "logprobs_and_entropy": Case(
        *(1, 1, vk.logprobs_and_entropy, dense_logprobs_and_entropy),
        *(reference.logprobs_and_entropy, 1, 2),
    ),
}


class Inputs(NamedTuple):
    """One set of inputs; every op takes a part of it."""

    student: Tensor  # [N, L]
    teacher: Tensor  # [N, L]
    ids: Tensor  # [N]
    many_ids: Tensor  # [N, 256]

    def of(self, case: Case) -> list[Tensor]:
        """The arguments of one op."""
        logits = [self.student, self.teacher][: case.sides]
        return logits + {0: [], 1: [self.ids]}.get(case.ids, [self.many_ids])


def make_inputs(
    rows: int, cols: int, dtype: torch.dtype, layout: str, device: torch.device, seed: int
) -> Inputs:
    """Seeded inputs, `[N, L]`, or `[B, T, L]` where they are sliced.

    "sliced" logits are `[:, :-1]` of `[B, T + 1, L]`, the positions that predict a token. "window"
    logits are the columns of a buffer one column wider, as of a padded vocabulary.
    """
    generator = torch.Generator(device).manual_seed(seed)
    batch = 4 if rows % 4 == 0 else 1
    lead = (batch, rows // batch) if layout == "sliced" else (rows,)
    shape = {"sliced": (batch, rows // batch + 1, cols), "window": (rows, cols + 1)}
    logits = []
    for _ in range(2):
        size = shape.get(layout, (rows, cols))
        buffer = torch.randn(*size, generator=generator, device=device).mul_(3).to(dtype)
        logits.append(buffer[:, : size[1] - 1] if layout in shape else buffer)
    draw = partial(torch.randint, cols, generator=generator, device=device)
    return Inputs(*logits, draw(lead), draw((*lead, CASES["logprobs_k256"].ids)))
