"""Custom operators: what torch.compile puts into its graph for an op of this package.

An operator is opaque to the compiler. What a call decides as it runs stays inside of it: which
implementation takes the tensors, bad ids of earlier calls, the exchange among the ranks. Of each
operator there are two. The plain one is for a whole vocabulary: the compiler may merge equal calls,
move them, and drop one whose result nobody uses. The sharded one runs collectives, whose order has
to be the same on all ranks, and ranks of different widths compile different code. So it is
registered as an ordered effect: the compiler keeps every call, in program order.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from vocabtp.kernels._backend import Implementation, Name, choose, wanted
from vocabtp.kernels._exchange import LOCAL, Exchange, name_of


class Parts(NamedTuple):
    """What an operator is made of; the functions take the operator's own arguments."""

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]  # empty outputs of the right shapes, for the compiler
    captured: bool = True  # whether a CUDA graph that the compiler makes may contain it


class Operator(NamedTuple):
    """An operator in both forms, and the one that its backward runs."""

    plain: CustomOpDef
    sharded: CustomOpDef
    gradient: CustomOpDef

    def __call__(self, *args: object, exchange: Exchange, name: str) -> Any:
        """A call of the public function `name`, as torch.compile traces it."""
        form = self.plain if exchange is LOCAL else self.sharded
        return form(*args, name_of(exchange), wanted(), name)


def define(
    name: str,
    forward: Parts,
    gradient: Parts,
    save: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Operator:
    """Register an op.

    Args:
        name: of the op.
        forward: the op itself.
        gradient: what its backward runs, an operator too.
        save: from context, inputs and outputs of the forward to what the backward needs.
        backward: from the gradient's operator, the context and the upstream gradients to those of
            the inputs.

    Returns:
        The operators.
    """
    grads = _register(f"{name}_backward", gradient)
    plain, sharded = _register(name, forward), _register(f"{name}_sharded", forward)
    for form in (plain, sharded):
        form.register_autograd(functools.partial(backward, grads), setup_context=save)
    _keep_in_order(sharded)
    return Operator(plain, sharded, grads)


def _keep_in_order(op: CustomOpDef) -> None:
    # not yet one of torch's public names: a release that moves it must not cost the ops that do
    # without torch.compile, and says so to those who compile
    try:
        from torch._library.effects import EffectType

        op.register_effect(EffectType.ORDERED)
    except (ImportError, AttributeError):
        warnings.warn(
            f"vocabtp.kernels: torch {torch.__version__} has no ordered effects where this package "
            f"looks for them, so torch.compile may reorder sharded ops",
            stacklevel=2,
        )


def _register(name: str, parts: Parts) -> CustomOpDef:
    op = torch.library.custom_op(
        f"vocabtp::{name}",
        parts.run,
        mutates_args=(),
        schema=parts.schema,
        tags=() if parts.captured else (torch.Tag.cudagraph_unsafe,),
    )
    op.register_fake(parts.fake)
    return op


def implementation(name: str, backend: str, *logits: Tensor) -> Implementation:
    """Who computes a call that asked for `backend` when it was traced."""
    return choose(name, *logits, name=cast("Name", backend)).implementation
