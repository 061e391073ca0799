"""Helpers to test sharded ops: the layouts worth trying, and a tensor's pieces on each rank.

They build on `vocabtp.kernels.testing`, which has the conformance inputs and the tolerance rule,
and need no test framework. A layout is the list of `(start, end)` of all ranks, in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabtp import kernels
from vocabtp.dist import ops as losses
from vocabtp.dist.shard import even_bounds
from vocabtp.kernels import reference
from vocabtp.kernels.testing import OPS, Case, assert_no_worse
from vocabtp.kernels.testing.cases import truth_of


def layouts(vocab_size: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    """Cuts of a vocabulary over ranks, by name: even, uneven, and empty pieces in every place.

    Args:
        vocab_size: columns to cut.
        world_size: ranks to cut over.

    Returns:
        Name -> `(start, end)` of every rank. With one rank there is one layout.
    """
    out = {"even": even_bounds(vocab_size, world_size)}
    if world_size == 1:
        return out
    # lopsided: rank r gets a share that grows with r
    total = world_size * (world_size + 1) // 2
    ends = [vocab_size * (r + 1) * (r + 2) // 2 // total for r in range(world_size)]
    out["uneven"] = list(zip([0, *ends[:-1]], ends, strict=True))
    for name, hole in (("first", 0), ("middle", world_size // 2), ("last", world_size - 1)):
        if name == "middle" and world_size == 2:
            continue
        pieces = iter(even_bounds(vocab_size, world_size - 1))
        bounds: list[tuple[int, int]] = []
        for rank in range(world_size):
            at = bounds[-1][1] if bounds else 0
            bounds.append((at, at) if rank == hole else next(pieces))
        out[f"empty {name}"] = bounds
    out["all on one"] = [(0, 0)] * (world_size - 1) + [(0, vocab_size)]
    return out


def piece(x: Tensor, bounds: tuple[int, int], *, requires_grad: bool = False) -> Tensor:
    """One rank's own copy of its columns, a leaf; `[..., V]` -> `[..., end - start]`."""
    return x[..., bounds[0] : bounds[1]].detach().clone().requires_grad_(requires_grad)


class Op(NamedTuple):
    """One sharded op with its options, beside its single-device form and its definition."""

    sharded: Callable[..., Any]
    dense: Callable[..., Any]  # vocabtp.kernels
    truth: Callable[..., Any]  # vocabtp.kernels.reference, fp64
    sides: int  # logits tensors it takes
    takes_ids: bool
    options: dict[str, Any]


def ops() -> dict[str, Op]:
    """Every loss of the package with the options that change its formula.

    Names and options are those of `vocabtp.kernels.testing.OPS`, whose cases fit them.
    """
    return {name: _op(*call) for name, call in OPS.items()}


def _op(name: str, options: Mapping[str, Any]) -> Op:
    return Op(
        sharded=getattr(losses, f"vocab_parallel_{name}"),
        dense=getattr(kernels, name),
        truth=getattr(reference, name),
        sides=2 if name in ("kl_div", "jsd") else 1,
        takes_ids=name.startswith("logprobs"),
        options=dict(options),
    )


def check_case(
    case: Case,
    bounds: tuple[int, int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    **call: Any,
) -> None:
    """Run one of `vocabtp.kernels.testing.CASES` on this rank's columns, see `check_op`.

    Args:
        case: the op and its input.
        bounds: this rank's columns.
        dtype: of the logits.
        device: where.
        **call: `tp_group`, `shard` or bounds, handed to the op.

    Raises:
        AssertionError: as `check_op`.
    """
    inputs = case.make().to(dtype, device)
    op = _op(case.function, case.options)
    sides = case.logits(inputs)
    index = inputs.index if case.takes_ids else None
    upstream = case.upstream(inputs, truth_of(case, inputs).values)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    try:
        gradients = [g.to(device, accumulate) for g in upstream]
        check_op(op, sides, bounds, gradients, index=index, **call)
    except AssertionError as error:
        error.add_note(case.name)
        raise


def hard_logits(rows: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Student and teacher `[rows, vocab_size]` fp32 with the rows that break implementations.

    Among ordinary rows: large offsets, equal logits, masked tokens (the same on both sides),
    support in one column only (the first or the last), no support at all, NaN.
    """
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, vocab_size, generator=g) * 3
    teacher = student + torch.randn(rows, vocab_size, generator=g)
    if rows < 10:
        return student, teacher
    for x in (student, teacher):
        x[0] = 0.5
        x[1] += 1e4
        x[2, ::2] = -math.inf
        x[3, : vocab_size // 2] = -math.inf
        x[4, :-1] = -math.inf
        x[5, 1:] = -math.inf
        x[6] = -math.inf
        x[7, vocab_size // 3] = math.nan
        x[8, -1] = 60.0
    teacher[1] -= 2e4
    teacher[9] = student[9]
    return student, teacher


def check_op(
    op: Op,
    logits: Sequence[Tensor],
    bounds: tuple[int, int],
    upstream: Sequence[Tensor],
    *,
    index: Tensor | None = None,
    slack: float = 4.0,
    **call: Any,
) -> tuple[Tensor, ...]:
    """Run an op on this rank's columns and judge values and gradients by the fp64 reference.

    Args:
        op: one of `ops()`.
        logits: the whole `[..., V]` tensors, equal on all ranks, in the dtype to run in.
        bounds: this rank's columns.
        upstream: gradient of each output of the op.
        index: ids, for an op that takes them.
        slack: how many times the error of the eager single-device op is allowed.
        **call: `tp_group`, `shard` or bounds, handed to the op.

    Returns:
        The op's outputs, to compare between ranks.

    Raises:
        AssertionError: a value or gradient is further from the truth than allowed, an input was
            written, or a gradient has another dtype or shape than its logits.
    """
    ids = () if index is None else (index,)
    local = [piece(x, bounds, requires_grad=True) for x in logits]
    before = [x.detach().clone() for x in local]
    outputs = _tuple(op.sharded(*local, *ids, **op.options, **call))
    grads = torch.autograd.grad(outputs, local, upstream)
    for x, old in zip(local, before, strict=True):
        same = (x == old) | (x.isnan() & old.isnan())
        assert bool(same.all()), "an input was written"
    whole = [x.detach().clone().requires_grad_() for x in logits]
    with kernels.backend("eager"):
        dense = _tuple(op.dense(*whole, *ids, **op.options))
    dense_grads = torch.autograd.grad(dense, whole, upstream)
    truth = _tuple(op.truth(*[x.double() for x in logits], *ids, **op.options))
    true_grads = reference.gradients(op.truth, logits, upstream, index=index, **op.options)
    for i, (value, plain, right) in enumerate(zip(outputs, dense, truth, strict=True)):
        assert_no_worse(value, plain, right, slack=slack, floor=_floor(right), what=f"output {i}")
    for i, (grad, plain, right) in enumerate(zip(grads, dense_grads, true_grads, strict=True)):
        assert grad.dtype == logits[i].dtype
        assert grad.shape == local[i].shape
        # over the whole row, so that a shard of small gradients is judged by the row's scale
        padded = plain.clone()
        padded[..., bounds[0] : bounds[1]] = grad
        assert_no_worse(
            padded, plain, right, slack=slack, floor=_floor(right), what=f"gradient {i}"
        )
    return tuple(x.detach() for x in outputs)


def _floor(truth: Tensor) -> float:
    """Four roundings of the largest finite number, 1 at least: what merging shards may add."""
    finite = truth[truth.isfinite()].abs()
    size = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return 4 * torch.finfo(torch.float32).eps * size


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
