"""Ranks inside one process: threads with an exchange among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Meeting:
    """Where threads put one tensor each and take all of them."""

    def __init__(self, world: int, limit: float) -> None:
        self.barrier = threading.Barrier(world, timeout=limit)
        self.slots: list[Tensor | None] = [None] * world


class ThreadExchange:
    """An `Exchange` among the threads of `run_sharded`."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        self._meeting = meeting

    def gather(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, in rank order."""
        return torch.stack(self._swap("gather", x))

    def sum(self, x: Tensor) -> Tensor:
        """Add the tensors of all ranks, in rank order."""
        parts = self._swap("sum", x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _swap(self, kind: str, x: Tensor) -> list[Tensor]:
        self.calls.append((kind, tuple(x.shape), x.dtype))
        meeting = self._meeting
        meeting.slots[self.rank] = x
        meeting.barrier.wait()
        parts = [part for part in meeting.slots if part is not None]
        # nobody may put down the next tensor before all have taken this one
        meeting.barrier.wait()
        return parts


def run_sharded(
    fn: Callable[[ThreadExchange, int, int], T],
    bounds: Sequence[tuple[int, int]],
    *,
    limit: float = 60.0,
) -> list[T]:
    """Run one thread a shard, with an exchange among them: ranks without processes.

    The threads must make the same calls of the exchange; their shapes, dtypes and order are
    compared at the end.

    Args:
        fn: called with the exchange, the first column of the shard and the one after its last.
        bounds: columns of each shard, in rank order; a shard may be empty.
        limit: seconds that a rank waits for another in one call of the exchange.

    Returns:
        What the calls returned, in rank order.

    Raises:
        AssertionError: ranks made different calls.
        threading.BrokenBarrierError: a rank waited in vain.
        Exception: of the first rank that raised, with the number of ranks that raised the same
            as a note.
    """
    meeting = _Meeting(len(bounds), limit)
    exchanges = [ThreadExchange(meeting, rank) for rank in range(len(bounds))]
    results: list[Any] = [None] * len(bounds)
    errors: list[Exception | None] = [None] * len(bounds)

    def run(rank: int) -> None:
        try:
            results[rank] = fn(exchanges[rank], *bounds[rank])
        except Exception as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [e for e in errors if e is not None]
    own = [e for e in raised if not isinstance(e, threading.BrokenBarrierError)]
    if raised:
        error = (own or raised)[0]
        same = sum(str(e) == str(error) for e in raised)
        error.add_note(f"raised on {same} of {len(bounds)} ranks")
        raise error
    calls = [exchange.calls for exchange in exchanges]
    if any(each != calls[0] for each in calls):
        raise AssertionError(f"ranks made different calls of the exchange: {calls}")
    return results
