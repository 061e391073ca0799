"""Every op with every option on every input, whole or in shards, against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vocabtp.kernels import ops, reference
from vocabtp.kernels._backend import backend
from vocabtp.kernels.testing.inputs import INPUTS, Inputs
from vocabtp.kernels.testing.ranks import ThreadExchange, run_sharded
from vocabtp.kernels.testing.rule import assert_no_worse

Bounds = Sequence[tuple[int, int]]

OPS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "logprobs": ("logprobs", {}),
        "entropy": ("entropy", {}),
        "logprobs_and_entropy": ("logprobs_and_entropy", {"temperature": 0.7}),
        "forward_kl": ("kl_div", {}),
        "reverse_kl": ("kl_div", {"reverse": True, "temperature": 1.7}),
        "forward_kl_clip": ("kl_div", {"pointwise_clip": 0.05}),
        "reverse_kl_clip": ("kl_div", {"reverse": True, "pointwise_clip": 0.05}),
        "jsd": ("jsd", {"temperature": 1.7}),
        "jsd_low": ("jsd", {"beta": 0.02, "rescale": True}),
        "jsd_high_clip": ("jsd", {"beta": 0.9, "rescale": True, "pointwise_clip": 0.01}),
        "jsd_clip": ("jsd", {"pointwise_clip": 0.01}),
        "jsd_0": ("jsd", {"beta": 0.0, "temperature": 0.7}),
        "jsd_1": ("jsd", {"beta": 1.0}),
    }
)
"""Names of the ways to call the ops: the function and its options."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call an op on one input."""

    op: str  # a key of OPS
    make: Callable[[], Inputs]

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{self.op}-{self.make.__name__}"

    @property
    def function(self) -> str:
        """The public op."""
        return OPS[self.op][0]

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options."""
        return OPS[self.op][1]

    @property
    def takes_ids(self) -> bool:
        """Whether the op takes ids."""
        return self.function.startswith("logprobs")

    def logits(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The sides that the op takes."""
        both = (inputs.student, inputs.teacher)
        return both if self.function in ("kl_div", "jsd") else both[:1]

    def upstream(self, inputs: Inputs, values: Sequence[Tensor]) -> list[Tensor]:
        """A gradient for each value."""
        lead = inputs.upstream.shape
        return [
            (inputs.upstream if v.shape == lead else inputs.upstream[..., None])
            .expand(v.shape)
            .to(v)
            for v in values
        ]


CASES: tuple[Case, ...] = tuple(Case(op, make) for make in INPUTS for op in OPS)
"""Every op with every option on every input."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Values and gradients of a case, over the whole vocabulary."""

    values: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    def size(self) -> float:
        """The largest finite number in it, 1 at least.

        Errors are measured by it: a gradient may be a small difference of numbers of the values'
        size.
        """
        found = [x[x.isfinite()].abs() for x in (*self.values, *self.grads)]
        return max([1.0, *(x.max().item() for x in found if x.numel())])


def run_case(
    case: Case, inputs: Inputs, op: Callable[..., Any] | None = None, bounds: Bounds | None = None
) -> Outcome:
    """Values and gradients of an op, whole or as shards in one process.

    Args:
        case: what to call.
        inputs: with what, see `Inputs.to`.
        op: another function with the public op's arguments; None for the public op.
        bounds: columns of each shard; None for the whole vocabulary in a plain call.

    Returns:
        Values and gradients, those of shards put together.

    Raises:
        AssertionError: ranks got different values, or made different calls of the exchange.
    """
    function = op or getattr(ops, case.function)
    sides = [x.detach() for x in case.logits(inputs)]
    width = sides[0].shape[-1]

    def call(exchange: ThreadExchange | None, start: int, stop: int) -> Outcome:
        leaves = [x[..., start:stop].detach().requires_grad_() for x in sides]
        options = dict(case.options)
        if exchange is not None:
            options["exchange"] = exchange
        if case.takes_ids:
            options["index"] = inputs.index
            if exchange is not None:
                options.update(vocab_start=start, vocab_size=width)
        out = function(*leaves, **options)
        values = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(values, leaves, case.upstream(inputs, values))
        return Outcome(tuple(v.detach() for v in values), grads)

    if bounds is None:
        return call(None, 0, width)
    parts = run_sharded(call, bounds)
    for part in parts[1:]:
        for one, other in zip(parts[0].values, part.values, strict=True):
            if not torch.equal(one.nan_to_num(nan=-1.5), other.nan_to_num(nan=-1.5)):
                raise AssertionError(f"{case.name}: ranks got different values")
    grads = tuple(torch.cat(side, -1) for side in zip(*[p.grads for p in parts], strict=True))
    return Outcome(parts[0].values, grads)


def truth_of(case: Case, inputs: Inputs) -> Outcome:
    """The same in dense fp64, on the CPU."""
    function = getattr(reference, case.function)
    inputs = inputs.to(torch.float64, "cpu")
    ids = {"index": inputs.index} if case.takes_ids else {}
    sides = case.logits(inputs)
    out = function(*sides, **ids, **case.options)
    values = out if isinstance(out, tuple) else (out,)
    grads = reference.gradients(
        function, sides, case.upstream(inputs, values), **ids, **case.options
    )
    return Outcome(values, grads)


def check_case(
    case: Case,
    op: Callable[..., Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bounds: Bounds | None = None,
    slack: float = 2.0,
) -> None:
    """Judge an op by `assert_no_worse`: values and gradients, non-finite ones exactly.

    Args:
        case: one of `CASES`.
        op: a function with the public op's arguments; None for the public op, with the
            implementation that is chosen for its tensors.
        dtype: of the logits.
        device: where.
        bounds: columns of each shard, for a case cut into shards.
        slack: how much worse than the eager implementation.

    Raises:
        AssertionError: what is wrong.
    """
    inputs = case.make().to(dtype, device)
    actual = run_case(case, inputs, op, bounds)
    with backend("eager"):
        eager = run_case(case, inputs)
    truth = truth_of(case, inputs)
    for kind in ("values", "grads"):
        triples = zip(
            getattr(actual, kind), getattr(eager, kind), getattr(truth, kind), strict=True
        )
        for number, (mine, yardstick, right) in enumerate(triples):
            assert_no_worse(
                mine,
                yardstick,
                right,
                slack=slack,
                floor=2 * torch.finfo(torch.float32).eps * truth.size(),
                what=f"{case.name}: {kind[:-1]} {number}",
            )
