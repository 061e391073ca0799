"""What is timed: every op of vocabtp.kernels beside the same formula in dense PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import vocabtp.kernels as vk
from vocabtp.kernels import reference

Op = Callable[..., Tensor]


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def dense_logprobs(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities of one token a row, as written with torch alone."""
    return _log_softmax(logits).gather(-1, index[:, None]).squeeze(-1)


def dense_entropy(logits: Tensor) -> Tensor:
    """Entropy, as written with torch alone."""
    log_p = _log_softmax(logits)
    return -(log_p.exp() * log_p).sum(-1)


def dense_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher), as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def dense_forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def dense_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence with beta 0.5, as written with torch alone."""
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    p, q = log_p.exp(), log_q.exp()
    log_m = (0.5 * (p + q)).log()
    return 0.5 * ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1))


@dataclass(frozen=True)
class Case:
    """One op: the arms to time, its fp64 truth, and the bytes that it cannot avoid."""

    inputs: str  # "logits", "logits ids" or "student teacher"
    ours: Op
    dense: Op
    truth: Op
    passes_forward: int  # times that a [rows, vocab] tensor is read or written
    passes_both: int  # the same for forward and backward together


CASES = {
    "logprobs": Case("logits ids", vk.logprobs, dense_logprobs, reference.logprobs, 1, 3),
    "entropy": Case("logits", vk.entropy, dense_entropy, reference.entropy, 1, 3),
    "reverse_kl": Case(
        "student teacher",
        lambda student, teacher: vk.kl_div(student, teacher, reverse=True),
        dense_reverse_kl,
        lambda student, teacher: reference.kl_div(student, teacher, reverse=True),
        2,
        5,
    ),
    "forward_kl": Case("student teacher", vk.kl_div, dense_forward_kl, reference.kl_div, 2, 5),
    "jsd": Case("student teacher", vk.jsd, dense_jsd, reference.jsd, 4, 7),
}


def make_inputs(
    case: Case, rows: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Seeded inputs; the first one requires a gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(device, dtype)
    inputs = [logits.requires_grad_()]
    if case.inputs == "logits ids":
        inputs.append(torch.randint(vocab, (rows,), generator=generator).to(device))
    if case.inputs == "student teacher":
        inputs.append((3 * torch.randn(rows, vocab, generator=generator)).to(device, dtype))
    return inputs
