"""The dense fp64 definition of every op, from softmax and sums as a textbook writes them.

This is the judge: it shares no code with what it judges, holds everything in fp64, and knows
nothing of shards or chunks. Values are differentiable where the mathematics is; `gradients` adds
the rules for rows without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

_INF = float("inf")
_NAN = float("nan")

Value = Tensor | tuple[Tensor, ...]


def logprobs(
    logits: Tensor, index: Tensor, *, ignore_index: int = -100, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities at `index` `[...]` or `[..., K]` of logits `[..., V]`, fp64.

    Args:
        logits: `[..., V]`.
        index: ids, each in `[0, V)` or `ignore_index`.
        ignore_index: its value is 0.
        temperature: divides the logits.

    Returns:
        The shape of `index`, fp64.
    """
    log_p = _log_softmax(logits, temperature)
    ids = index if index.dim() == logits.dim() else index.unsqueeze(-1)
    ignored = ids == ignore_index
    values = log_p.gather(-1, ids.long().masked_fill(ignored, 0))
    values = torch.where(_undefined(logits).unsqueeze(-1), _NAN, values)
    return torch.where(ignored, 0.0, values).view(index.shape)


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy `-sum p log p` of logits `[..., V]`, fp64.

    Args:
        logits: `[..., V]`.
        temperature: divides the logits.

    Returns:
        `[...]` fp64.
    """
    log_p = _log_softmax(logits, temperature)
    summed = -(log_p.exp() * _finite(log_p, logits == -_INF)).sum(-1)
    return torch.where(_undefined(logits), _NAN, summed)


def logprobs_and_entropy(
    logits: Tensor, index: Tensor, *, ignore_index: int = -100, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Both of the above.

    Args:
        logits: `[..., V]`.
        index: as for `logprobs`.
        ignore_index: as for `logprobs`.
        temperature: divides the logits.

    Returns:
        `(logprobs, entropy)`, fp64.
    """
    values = logprobs(logits, index, ignore_index=ignore_index, temperature=temperature)
    return values, entropy(logits, temperature=temperature)


def kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    reverse: bool = False,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """KL(teacher || student), or with `reverse` KL(student || teacher), fp64.

    Args:
        student_logits: `[..., V]`.
        teacher_logits: `[..., V]`.
        reverse: the direction.
        pointwise_clip: caps each term from above.
        temperature: divides both sides.

    Returns:
        `[...]` fp64.
    """
    a, b = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
    log_a, log_b = _log_softmax(a, temperature), _log_softmax(b, temperature)
    outside_a, outside_b = a == -_INF, b == -_INF
    mismatch = ~outside_a & outside_b
    if pointwise_clip is None:
        terms = log_a.exp() * (_finite(log_a, outside_a) - _finite(log_b, outside_a))
        # decided on the logits: infinite even where a underflows
        terms = torch.where(mismatch & terms.isnan(), _INF, terms)
    else:
        terms = log_a.exp() * (_finite(log_a, outside_a) - _finite(log_b, outside_b))
        # an infinite term is at the cap, a constant
        terms = torch.where(mismatch, pointwise_clip, terms.clamp(max=pointwise_clip))
    summed = terms.sum(-1)
    return torch.where(_undefined(a) | _undefined(b), _NAN, summed)


def jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    rescale: bool = False,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`beta KL(q || m) + (1 - beta) KL(p || m)` with `m = beta q + (1 - beta) p`, fp64.

    Args:
        student_logits: `[..., V]`.
        teacher_logits: `[..., V]`.
        beta: 0 is forward KL, 1 reverse KL.
        rescale: divide an interior beta's value by `beta (1 - beta)`.
        pointwise_clip: caps each term from above.
        temperature: divides both sides.

    Returns:
        `[...]` fp64.
    """
    if beta in (0.0, 1.0):
        return kl_div(
            student_logits,
            teacher_logits,
            reverse=beta == 1.0,
            pointwise_clip=pointwise_clip,
            temperature=temperature,
        )
    log_p = _log_softmax(student_logits, temperature)
    log_q = _log_softmax(teacher_logits, temperature)
    outside_p, outside_q = student_logits == -_INF, teacher_logits == -_INF
    p, q = log_p.exp(), log_q.exp()
    mix = beta * q + (1 - beta) * p
    # outside both supports, or so far below that neither side has anything to add
    gone = mix == 0
    log_m = _finite(mix, gone, fill=1.0).log()
    term_p = p * _finite(_finite(log_p, outside_p) - log_m, outside_p | gone)
    term_q = q * _finite(_finite(log_q, outside_q) - log_m, outside_q | gone)
    terms = beta * term_q + (1 - beta) * term_p
    if pointwise_clip is not None:
        terms = terms.clamp(max=pointwise_clip)
    summed = terms.sum(-1)
    if rescale:
        summed = summed / (beta * (1 - beta))
    return torch.where(_undefined(student_logits) | _undefined(teacher_logits), _NAN, summed)


def gradients(
    op: Callable[..., Value],
    logits: Sequence[Tensor],
    upstream: Sequence[Tensor],
    *,
    index: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, ...]:
    """Gradients of one of the functions above, fp64, with the rules for rows that have none.

    A row whose upstream gradients are all exactly 0 (those of ignored ids do not count), or that
    has no distribution, gets a gradient of exactly 0; autograd sees the other rows alone.

    Args:
        op: a function of this module.
        logits: its one or two logits tensors `[..., V]`.
        upstream: the gradient of each of its outputs.
        index: its ids, if it takes any.
        **options: its other arguments.

    Returns:
        One fp64 gradient for each of `logits`.
    """
    width = logits[0].shape[-1]
    rows = logits[0].shape[:-1].numel()
    flat = [x.detach().double().reshape(rows, width) for x in logits]
    weights = [g.detach().double().reshape(rows, g.numel() // max(rows, 1)) for g in upstream]
    ids = None
    if index is not None:
        ids = index.reshape(rows, index.numel() // max(rows, 1))
        skipped = torch.tensor(options.get("ignore_index", -100), device=ids.device)
        weights[0] = torch.where(ids == skipped, 0.0, weights[0])
    live = torch.zeros(rows, dtype=torch.bool, device=flat[0].device)
    for weight in weights:
        live |= (weight != 0).any(-1)
    for side in flat:
        live &= ~_undefined(side)
    leaves = [side[live].requires_grad_() for side in flat]
    call = partial(op, *leaves, **options)
    result = call() if ids is None else partial(op, *leaves, ids[live], **options)()
    outputs = result if isinstance(result, tuple) else (result,)
    shaped = [w[live].view(out.shape) for w, out in zip(weights, outputs, strict=True)]
    found = torch.autograd.grad(outputs, leaves, shaped)
    results = []
    for leaf, grad, original in zip(flat, found, logits, strict=True):
        full = torch.zeros_like(leaf)
        full[live] = grad
        results.append(full.view(original.shape))
    return tuple(results)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    # +inf has no softmax either
    x = (logits.double() + torch.where(logits == _INF, _NAN, 0.0)) / temperature
    safe = torch.where(_undefined(logits).unsqueeze(-1), 0.0, x)
    return x - torch.logsumexp(safe, -1, keepdim=True)


def _undefined(logits: Tensor) -> Tensor:
    return (logits == -_INF).all(-1)


def _finite(x: Tensor, where: Tensor, fill: float = 0.0) -> Tensor:
    """`x` with a constant at `where`, through which no gradient flows."""
    return torch.where(where, fill, x)
