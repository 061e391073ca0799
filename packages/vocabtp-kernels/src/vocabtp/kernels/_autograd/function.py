"""What every autograd.Function here shares: its context, no second derivative, no autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Ctx(FunctionCtx):
    spec: Any
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _NoSecond(torch.autograd.Function):
    """Passes a gradient on, and raises when somebody differentiates it."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "vocabtp.kernels: gradients of these ops cannot be differentiated again; "
            "create_graph=True has no use here"
        )


def once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run a backward without a graph; differentiating its result raises.

    torch's `once_differentiable` lets the result pass as a constant where the upstream gradient is
    one, so that a gradient penalty would silently train on nothing.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            grads = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return grads
        return tuple(
            call(_NoSecond, g.requires_grad_()) if isinstance(g, Tensor) else g for g in grads
        )

    return wrapped


def call(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def plain(device: torch.device) -> torch.autocast:
    """No autocast: the dtypes here are chosen."""
    return torch.autocast(device.type, enabled=False)
