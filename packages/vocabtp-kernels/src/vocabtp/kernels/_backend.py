"""Which implementation runs for a call's tensors, and why; `backend` overrides it.

An implementation is a module with the functions of `Implementation`. The choice is made once a
call, in the forward, and kept for the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from vocabtp.kernels import _eager
from vocabtp.kernels._ids import Bounds, Watch
from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import ShardStats, TokenShard, TokenValues

Name = Literal["auto", "triton", "eager"]


class Implementation(Protocol):
    """The functions that read or write `[N, L]`, and those of `_stats` that every call needs.

    Sums are centred on the maximum of the logits as they are and divided by the temperature after
    that. A row with an upstream of 0 or an undefined side gets gradients of exactly 0. `out`
    tensors are `[N, L]`, contiguous.
    """

    def token_stats(
        self,
        logits: Rows,
        ids: Rows,
        bounds: Bounds,
        dtype: torch.dtype,
        temperature: float,
        *,
        entropy: bool,
        merged: bool,
        watch: Watch | None,
    ) -> TokenShard:
        """`(m; S; bad id)` or `(m; S, W; bad id)`, and what ids, K a row, choose.

        Statistics are `[P, *, N]` of P parts of the row, of one if `merged`. `watch` is there if
        this shard's bad ids are all there are.
        """
        ...

    def finish_tokens(
        self,
        stats: ShardStats,
        chosen: Tensor,
        ids: Rows,
        bounds: Bounds,
        temperature: float,
        *,
        entropy: bool,
        watch: Watch | None,
    ) -> TokenValues:
        """Merges `[P, *, N]`, of parts or of ranks, and finishes; `chosen` are all ranks'.

        Log-probabilities are written where `chosen` is: 0 for an ignored id, NaN for the others of
        a row with a bad id anywhere.
        """
        ...

    def token_grad(
        self,
        logits: Rows,
        stats: Tensor,
        ids: Rows,
        bounds: Bounds,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        out: Tensor,
        temperature: float,
    ) -> None:
        """`sum_k w_k (onehot_k - p) - w_h p (log p + H)`, w the upstream gradients over T.

        `stats` `[3 or 4, N]` are those of `finish_tokens`. Where every upstream gradient of a row
        is 0, and in rows without support, it is exactly 0. A row with a bad id is NaN if an
        upstream gradient of an id that is not ignored is not 0.
        """
        ...

    def kl_stats(
        self, a: Rows, b: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
    ) -> ShardStats:
        """`(m_a, m_b; S_a, S_b, W; A supports what B masks)` `[P, *, N]` of P parts of each row.

        `merged` asks for one part.
        """
        ...

    def kl_terms(
        self, a: Rows, b: Rows, stats: ShardStats, temperature: float, clip: float, *, merged: bool
    ) -> Tensor:
        """`[P, 3, N]`: sums of the clipped terms t, of a f and of w a."""
        ...

    def kl_grad(
        self,
        a: Rows,
        b: Rows,
        stats: ShardStats,
        terms: Tensor | None,
        upstream: Tensor,
        factor: float,
        out_a: Tensor | None,
        out_b: Tensor | None,
        temperature: float,
        clip: float | None,
    ) -> None:
        """`upstream` `[N]` times `factor` times `a (d - W / S_a)` and `b - a`, or clipped."""
        ...

    def pair_stats(
        self, p: Rows, q: Rows, dtype: torch.dtype, temperature: float, *, merged: bool
    ) -> ShardStats:
        """`(m_p, m_q; S_p, S_q)` `[P, *, N]`."""
        ...

    def jsd_terms(
        self,
        p: Rows,
        q: Rows,
        stats: ShardStats,
        temperature: float,
        beta: float,
        clip: float | None,
        *,
        merged: bool,
    ) -> Tensor:
        """`[P, 3, N]`: sums of the terms t, of w p log(p/m) and of w q log(q/m)."""
        ...

    def jsd_grad(
        self,
        p: Rows,
        q: Rows,
        stats: ShardStats,
        terms: Tensor,
        upstream: Tensor,
        factor: float,
        out_p: Tensor | None,
        out_q: Tensor | None,
        temperature: float,
        beta: float,
        clip: float | None,
    ) -> None:
        """The same times `(1 - beta) p (w log(p/m) - E_p)` and `beta q (w log(q/m) - E_q)`."""
        ...

    def merge_pair(self, parts: ShardStats, temperature: float) -> ShardStats:
        """As in `_stats`."""
        ...

    def finish_kl(self, parts: ShardStats, temperature: float) -> tuple[Tensor, ShardStats]:
        """As in `_stats`."""
        ...

    def finish_terms(self, parts: Tensor, stats: ShardStats, scale: float) -> tuple[Tensor, Tensor]:
        """As in `_stats`."""
        ...


class Choice(NamedTuple):
    """An implementation and why it was taken."""

    implementation: Implementation
    name: str
    reason: str


class _Wanted(threading.local):
    """What this thread asked for; unlike a ContextVar it can be read inside torch.compile."""

    def __init__(self) -> None:
        self.name: Name = "auto"


_wanted = _Wanted()


def wanted() -> Name:
    """What the innermost `backend` of this thread asks for; torch.compile guards on it."""
    return _wanted.name


@contextmanager
def backend(name: Name) -> Iterator[None]:
    """Choose the implementation for the calls inside, in this thread.

    Args:
        name: "auto" takes the fastest that can run, "eager" always works, "triton" makes a call
            raise where it cannot run. A backward runs with the implementation of its forward. A
            forward that activation checkpointing repeats is a call of its own, in the thread that
            runs the backward: set the override there too.

    Raises:
        ValueError: another name. Inside, a call whose tensors the named implementation cannot take
            raises ValueError too.
        RuntimeError: inside "triton", by a call one of whose kernels does not compile for the
            device; "auto" goes on in eager PyTorch then, with a warning.
    """
    if name not in get_args(Name):
        raise ValueError(f"backend: name must be one of {list(get_args(Name))}, got {name!r}")
    before, _wanted.name = _wanted.name, name
    try:
        yield
    finally:
        _wanted.name = before


def which_backend(*tensors: Tensor) -> tuple[str, str]:
    """Name and reason of the implementation that a call with these logits would run on.

    Args:
        tensors: the logits of the call, one or two.

    Returns:
        `(name, reason)`, both for reading by people; the name is "eager" or "triton".

    Raises:
        TypeError: without a tensor, or something else among them.
        ValueError: inside `backend("triton")` with tensors that it cannot take.
    """
    if wrong := [x for x in tensors or (None,) if not isinstance(x, Tensor)]:
        found = "no tensor" if not tensors else type(wrong[0]).__name__
        raise TypeError(f"which_backend: give the logits of the call, got {found}")
    choice = choose("which_backend", *tensors)
    return choice.name, choice.reason


def choose(caller: str, *tensors: Tensor, name: Name | None = None) -> Choice:
    """The implementation for a call with these logits; `name` is what is wanted, if known."""
    name = _wanted.name if name is None else name
    if name == "eager":
        return Choice(_eager, "eager", 'backend("eager")')
    obstacle = _obstacle(tensors[0].device, [x.dtype for x in tensors], asked=name == "triton")
    if obstacle is None:
        from vocabtp.kernels import _triton  # no sooner: it imports triton

        if name == "triton":
            return Choice(_triton, "triton", 'backend("triton")')
        if _triton.broken(tensors[0].device):
            return Choice(_eager, "eager", "a Triton kernel did not compile for the device")
        return Choice(_triton.UNLESS_BROKEN, "triton", "Triton kernels for the tensors' device")
    if name == "triton":
        raise ValueError(
            f'{caller}: backend("triton") is not available for these tensors: {obstacle}; '
            f'use backend("auto") or backend("eager")'
        )
    return Choice(_eager, "eager", obstacle)


def _obstacle(device: torch.device, dtypes: list[torch.dtype], *, asked: bool) -> str | None:
    """Why the Triton kernels cannot take these tensors, or are not what nobody asked for."""
    if device.type == "cpu" and not asked:
        return "the tensors are on the CPU"
    if torch.float64 in dtypes:
        return "fp64 runs in eager PyTorch"
    try:
        from vocabtp.kernels import _triton
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return _triton.obstacle(device)
