"""Helpers to test sharded ops: the layouts worth trying, and a tensor's pieces on each rank.

They build on `vocabtp.kernels.testing`, which has the conformance inputs and the tolerance rule,
and need no test framework. A layout is the list of `(start, end)` of all ranks, in rank order.
"""

from __future__ import annotations

from torch import Tensor

from vocabtp.dist.shard import even_bounds


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


def tensor_pieces(x: Tensor, bounds: list[tuple[int, int]]) -> list[Tensor]:
    """The columns of all ranks, views; `[..., V]` -> R times `[..., end - start]`."""
    return [x[..., start:end] for start, end in bounds]
