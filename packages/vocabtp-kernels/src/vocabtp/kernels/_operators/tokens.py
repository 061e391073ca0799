"""Log-probabilities and entropies as operators: `logprobs`, `entropy` and both.

The forward returns log-probabilities `[N, K]` (K = 0 for `entropy`), entropies `[N]` (`[0]` for
`logprobs`), and the statistics that the backward needs. A bad id of a call that does not wait
raises where it does outside of torch.compile: in the next op, when that runs. Until then the call
is remembered with a tensor of its own, which a CUDA graph of the compiler (`reduce-overhead`) would
overwrite; so the compiler calls the forwards that take ids between its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels import _ids
from vocabtp.kernels._autograd import tokens
from vocabtp.kernels._exchange import keep, named
from vocabtp.kernels._operators.define import Operator, Parts, define, implementation
from vocabtp.kernels._spec import TokenSpec

_OPTIONS = (
    "float temperature, int ignore_index, SymInt vocab_start, SymInt vocab_size, bool at_once, "
    "str exchange, str backend, str name"
)


class _Options(NamedTuple):
    """The arguments of an operator that are no tensors."""

    temperature: float
    ignore_index: int
    vocab_start: int
    vocab_size: int
    at_once: bool
    exchange: str
    backend: str
    name: str

    def spec(self, logits: Tensor) -> TokenSpec:
        """The call that they are."""
        return TokenSpec(
            name=self.name,
            implementation=implementation(self.name, self.backend, logits),
            exchange=named(self.exchange),
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            at_once=self.at_once,
        )


_Outputs = tuple[Tensor, Tensor, Tensor]


def _run_grad(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    ids: Tensor | None,
    stats: Tensor,
    *options: Any,
) -> Tensor:
    saved = tokens.Saved(logits, ids, stats)
    grad = tokens.backward(saved, grad_logprobs, grad_entropy, _Options(*options).spec(logits))
    assert grad is not None
    return grad


def _fake_grad(_: Tensor | None, __: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _operator(name: str, *, entropy: bool) -> Operator:
    def forward(logits: Tensor, ids: Tensor | None, *options: Any) -> _Outputs:
        _ids.check_earlier()
        spec = _Options(*options).spec(logits)
        values, saved = tokens.forward(logits, ids, spec, entropy=entropy)
        entropies = values.stats.new_empty(0) if values.entropies is None else values.entropies
        return values.logprobs, entropies, saved.stats

    def fake(logits: Tensor, ids: Tensor | None, *options: Any) -> _Outputs:
        keep(_Options(*options).exchange)
        rows, dtype = math.prod(logits.shape[:-1]), TokenSpec.dtype(logits)
        return (
            logits.new_empty(rows, 0 if ids is None else ids.shape[-1], dtype=dtype),
            logits.new_empty(rows if entropy else 0, dtype=dtype),
            logits.new_empty(4 if entropy else 3, rows, dtype=dtype),
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, ids, *ctx.options = inputs
        ctx.save_for_backward(logits, ids, output[2])
        ctx.set_materialize_grads(False)

    def backward(
        gradient: Callable[..., Tensor],
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        *_: None,
    ) -> tuple[Tensor | None, ...]:
        rest = [None] * (1 + len(ctx.options))
        grads = (grad_logprobs, grad_entropy if entropy else None)
        if grads[0] is None and grads[1] is None:
            return None, *rest
        return gradient(*grads, *ctx.saved_tensors, *ctx.options), *rest

    grads = "Tensor? grad_logprobs, Tensor? grad_entropy"
    saved = "Tensor logits, Tensor? ids, Tensor stats"
    outputs = "(Tensor, Tensor, Tensor)"
    return define(
        name,
        Parts(
            f"(Tensor logits, Tensor? ids, {_OPTIONS}) -> {outputs}",
            forward,
            fake,
            captured=name == "entropy",
        ),
        Parts(f"({grads}, {saved}, {_OPTIONS}) -> Tensor", _run_grad, _fake_grad),
        save,
        backward,
    )


LOGPROBS = _operator("logprobs", entropy=False)
ENTROPY = _operator("entropy", entropy=True)
LOGPROBS_AND_ENTROPY = _operator("logprobs_and_entropy", entropy=True)
