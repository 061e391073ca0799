"""A checked call on its way to who computes it: an autograd.Function, or an operator of a graph.

Outside of torch.compile the Function costs less; inside, only an operator stays whole.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from vocabtp.kernels import _ids, checks
from vocabtp.kernels._autograd import Entropy, Jsd, KlDiv, Logprobs, LogprobsAndEntropy, call
from vocabtp.kernels._backend import choose
from vocabtp.kernels._exchange import LOCAL, Exchange
from vocabtp.kernels._operators import pairs, tokens
from vocabtp.kernels._operators.define import Operator
from vocabtp.kernels._spec import PairSpec, TokenSpec


class Options(TypedDict):
    """Everything of a call but its tensors and who computes it."""

    name: str
    exchange: Exchange
    temperature: float


class TokenOptions(Options):
    """And of one about tokens of one distribution."""

    ignore_index: int
    vocab_start: int
    vocab_size: int
    at_once: bool


class PairOptions(Options):
    """And of one about two distributions."""

    clip: float | None
    beta: float
    scale: float


def begin() -> None:
    """Report bad ids of earlier calls; an operator of a compiled graph does so when it runs."""
    if not torch.compiler.is_compiling():
        _ids.check_earlier()


def kl(student: Tensor, teacher: Tensor, reverse: bool, options: PairOptions) -> Tensor:
    """Forward or reverse KL of each row `[...]`."""
    a, b = (student, teacher) if reverse else (teacher, student)
    return _pair(KlDiv, pairs.KL_DIV, a, b, options)


def jsd(student: Tensor, teacher: Tensor, options: PairOptions) -> Tensor:
    """JSD of an interior beta, of each row `[...]`."""
    return _pair(Jsd, pairs.JSD, student, teacher, options)


def _pair(
    function: type[torch.autograd.Function],
    operator: Operator,
    one: Tensor,
    two: Tensor,
    options: PairOptions,
) -> Tensor:
    if torch.compiler.is_compiling():
        values: Tensor = operator(
            one,
            two,
            options["temperature"],
            options["clip"],
            options["beta"],
            options["scale"],
            exchange=options["exchange"],
            name=options["name"],
        )[0]
    else:
        implementation = choose(options["name"], one, two).implementation
        values = call(function, one, two, PairSpec(**options, implementation=implementation))
    return values.view(one.shape[:-1])


def token_call(
    caller: str,
    logits: object,
    index: object,
    ignore_index: object,
    temperature: object,
    exchange: Exchange,
    vocab_start: object,
    vocab_size: object,
    validate_ids: object,
) -> tuple[Tensor, Tensor, TokenOptions]:
    """Check the arguments of the two ops that take ids; ids come back as `[..., K]`."""
    begin()
    checked = checks.logits(caller, "logits", logits)
    ids = checks.index(caller, index, checked)
    start = checks.integer(caller, "vocab_start", vocab_start)
    width = checked.shape[-1]
    size = width if vocab_size is None else checks.integer(caller, "vocab_size", vocab_size)
    if not 0 <= start <= start + width <= size:
        raise ValueError(
            f"{caller}: the shard must lie in the vocabulary, got columns {start} to "
            f"{start + width} of vocab_size {size}"
        )
    if exchange is LOCAL and width != size:
        raise ValueError(
            f"{caller}: without an exchange the logits are the whole vocabulary, got {width} "
            f"columns of vocab_size {size}"
        )
    if validate_ids is None:
        at_once = ids.device.type == "cpu"
    else:
        at_once = checks.flag(caller, "validate_ids", validate_ids)
    options = TokenOptions(
        name=caller,
        exchange=exchange,
        temperature=checks.temperature(caller, temperature),
        ignore_index=checks.integer(caller, "ignore_index", ignore_index),
        vocab_start=start,
        vocab_size=size,
        at_once=at_once,
    )
    return checked, ids, options


def logprobs(logits: Tensor, ids: Tensor, options: TokenOptions) -> Tensor:
    """`[N, K]` for ids `[..., K]`."""
    if torch.compiler.is_compiling():
        return _token_operator(tokens.LOGPROBS, logits, ids, options)[0]
    values: Tensor = call(Logprobs, logits, ids, _token_spec(logits, options))
    return values


def entropy(logits: Tensor, options: TokenOptions) -> Tensor:
    """`[N]`."""
    if torch.compiler.is_compiling():
        return _token_operator(tokens.ENTROPY, logits, None, options)[1]
    values: Tensor = call(Entropy, logits, _token_spec(logits, options))
    return values


def logprobs_and_entropy(
    logits: Tensor, ids: Tensor, options: TokenOptions
) -> tuple[Tensor, Tensor]:
    """`[N, K]` for ids `[..., K]`, and `[N]`."""
    if torch.compiler.is_compiling():
        values, entropies, *_ = _token_operator(tokens.LOGPROBS_AND_ENTROPY, logits, ids, options)
    else:
        values, entropies = call(LogprobsAndEntropy, logits, ids, _token_spec(logits, options))
    return values, entropies


def _token_spec(logits: Tensor, options: TokenOptions) -> TokenSpec:
    return TokenSpec(**options, implementation=choose(options["name"], logits).implementation)


def _token_operator(
    operator: Operator, logits: Tensor, ids: Tensor | None, options: TokenOptions
) -> tuple[Tensor, Tensor, Tensor]:
    values: tuple[Tensor, Tensor, Tensor] = operator(
        logits,
        ids,
        options["temperature"],
        options["ignore_index"],
        options["vocab_start"],
        options["vocab_size"],
        options["at_once"],
        exchange=options["exchange"],
        name=options["name"],
    )
    return values
