"""What an op needs of a communication layer: two methods, the identity on one device.

An operator of a compiled graph (`_operators`) takes no Python object, so there an exchange goes by
its name: `name_of` gives one while torch.compile traces, `named` finds the exchange again when the
operator runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """How the ranks that share one vocabulary put their statistics together.

    Every rank calls the same methods in the same order with tensors of the same shape and dtype,
    whatever the width of its shard. Neither method is differentiated, and both run outside
    autocast.

    Inside torch.compile an exchange is known by its identity: another object recompiles, and one
    that was compiled with lives as long as the process. So it has to be made outside of the
    compiled function, unless it has an attribute `compiled_name`, see `name_exchanges`.
    """

    def gather(self, x: Tensor) -> Tensor:
        """Stack `x` `[*]` of all ranks to `[R, *]`, in rank order, the same on all ranks.

        Must not write to `x`.
        """
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Add `x` `[*]` over all ranks; each element is nonzero on one rank at most.

        `x` is given up and may be written to, and the result is written to: it is `x` itself, as
        of a reduction in place, or a tensor that no other rank and nobody else has.
        """
        ...


class _Local:
    """One rank that holds the whole vocabulary."""

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def sum(self, x: Tensor) -> Tensor:
        return x

    def __repr__(self) -> str:
        return "LOCAL"


LOCAL: Exchange = _Local()
"""The exchange of a single device: there is nobody to talk to."""


_OBJECT = "object"
# never emptied: a graph that names one of these can be called for as long as the process lives
_objects: dict[str, Exchange] = {}
_finders: dict[str, Callable[[str], Exchange]] = {
    "local": lambda _: LOCAL,
    _OBJECT: lambda key: _objects[key],
}


def name_exchanges(kind: str, find: Callable[[str], Exchange]) -> None:
    """Let exchanges of a kind go by names inside torch.compile, instead of by their identity.

    Such an exchange has an attribute or property `compiled_name`, `f"{kind}:{rest}"`, that
    torch.compile can trace. Exchanges of one name are the same to a compiled function, and may be
    made inside of it.

    Args:
        kind: what the names begin with; no colon.
        find: from `rest` to the exchange, each time that a compiled op runs.

    Raises:
        ValueError: a kind with a colon.
    """
    if ":" in kind:
        raise ValueError(f"name_exchanges: kind must be a word without a colon, got {kind!r}")
    _finders[kind] = find


def name_of(exchange: Exchange) -> str:
    """The name of an exchange, for torch.compile to trace."""
    if exchange is LOCAL:
        return "local:"
    name = getattr(exchange, "compiled_name", None)
    if isinstance(name, str):
        return name
    # the tracer guards on what `id` was asked of: another exchange is traced anew
    return f"{_OBJECT}:{id(exchange)}"


def keep(name: str) -> None:
    """Keep the exchange of a name for when its operator runs; called while the tracer holds it."""
    kind, _, identity = name.partition(":")
    if kind == _OBJECT and identity not in _objects:
        # no object gets through a trace; its identity does, and is its address in CPython, without
        # which there is no torch.compile
        _objects[identity] = ctypes.cast(int(identity), ctypes.py_object).value


def named(name: str) -> Exchange:
    """The exchange of a name that `name_of` gave."""
    kind, _, rest = name.partition(":")
    return _finders[kind](rest)
