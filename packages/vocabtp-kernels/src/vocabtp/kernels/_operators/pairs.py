"""KL and JSD as operators.

The forward returns the values and one `[planes, N]` tensor of what the backward needs, since the
outputs of an operator must not share memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels import _ids
from vocabtp.kernels._autograd import pairs
from vocabtp.kernels._exchange import keep, named
from vocabtp.kernels._operators.define import Operator, Parts, define, implementation
from vocabtp.kernels._spec import PairSpec

_OPTIONS = (
    "float temperature, float? clip, float beta, float scale, str exchange, str backend, str name"
)


class _Options(NamedTuple):
    """The arguments of an operator that are no tensors."""

    temperature: float
    clip: float | None
    beta: float
    scale: float
    exchange: str
    backend: str
    name: str

    def spec(self, a: Tensor, b: Tensor) -> PairSpec:
        """The call that they are."""
        return PairSpec(
            name=self.name,
            implementation=implementation(self.name, self.backend, a, b),
            exchange=named(self.exchange),
            temperature=self.temperature,
            clip=self.clip,
            beta=self.beta,
            scale=self.scale,
        )


class _Pair(NamedTuple):
    """One op on two distributions."""

    forward: Callable[[Tensor, Tensor, PairSpec], tuple[Tensor, list[Tensor]]]
    backward: Callable[..., list[Tensor | None]]
    planes: Callable[[bool], tuple[int, ...]]  # rows of each saved tensor, given whether it clips


def _operator(name: str, pair: _Pair) -> Operator:
    def forward(a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        _ids.check_earlier()
        values, saved = pair.forward(a, b, _Options(*options).spec(a, b))
        return values, torch.cat(saved)

    def fake(a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        asked = _Options(*options)
        keep(asked.exchange)
        rows, dtype = math.prod(a.shape[:-1]), PairSpec.dtype(a, b)
        planes = sum(pair.planes(asked.clip is not None))
        return a.new_empty(rows, dtype=dtype), a.new_empty(planes, rows, dtype=dtype)

    def run_grad(
        grad: Tensor, a: Tensor, b: Tensor, saved: Tensor, needs: Sequence[bool], *options: Any
    ) -> list[Tensor]:
        spec = _Options(*options).spec(a, b)
        parts = torch.split(saved, list(pair.planes(spec.clip is not None)))
        grads = pair.backward(grad, a, b, parts, spec, needs)
        return [g for g in grads if g is not None]

    def fake_grad(
        grad: Tensor, a: Tensor, b: Tensor, saved: Tensor, needs: Sequence[bool], *options: Any
    ) -> list[Tensor]:
        sides = zip((a, b), needs, strict=True)
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, need in sides if need]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        a, b, *ctx.options = inputs
        ctx.save_for_backward(a, b, output[1])

    def backward(
        gradient: Callable[..., list[Tensor]], ctx: Any, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:2])
        grads = iter(gradient(grad, *ctx.saved_tensors, needs, *ctx.options))
        return *(next(grads) if need else None for need in needs), *[None] * len(ctx.options)

    inputs = "Tensor a, Tensor b"
    return define(
        name,
        Parts(f"({inputs}, {_OPTIONS}) -> (Tensor, Tensor)", forward, fake),
        Parts(
            f"(Tensor grad, {inputs}, Tensor saved, bool[] needs, {_OPTIONS}) -> Tensor[]",
            run_grad,
            fake_grad,
        ),
        save,
        backward,
    )


KL_DIV = _operator(
    "kl_div",
    _Pair(pairs.kl_forward, pairs.kl_backward, lambda clips: (2, 3, 1, 3) if clips else (2, 3, 1)),
)
JSD = _operator("jsd", _Pair(pairs.jsd_forward, pairs.jsd_backward, lambda _: (2, 2, 0, 3)))
