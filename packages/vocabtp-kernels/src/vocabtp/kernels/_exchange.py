"""What an op needs of a communication layer: two methods, the identity on one device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """How the ranks that share one vocabulary put their statistics together.

    Every rank calls the same methods in the same order with tensors of the same shape and dtype,
    whatever the width of its shard. Neither method is differentiated, neither may write to its
    argument, and both run outside autocast.
    """

    def gather(self, x: Tensor) -> Tensor:
        """Stack `x` `[*]` of all ranks to `[R, *]`, in rank order, the same on all ranks."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Add `x` `[*]` over all ranks; each element is nonzero on one rank at most."""
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
