"""Page-locked host memory that outlives the caches it is lent to.

A caching host allocator rounds every block up to a power of two, and keeps for each length what
that length needed. A `PinnedPool` asks it for powers of two only and cuts them itself: any bytes
that are free serve any payload, so what is held follows the largest sum of payloads in use and
not the history of lengths.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# few pieces a payload: each costs the host some 20 us when it is copied
MAX_BLOCK_BYTES = 256 << 20
PAGE_BYTES = 4096
# pieces start at a multiple of this, whatever the dtype of the rows
ALIGNMENT = 64
# growth in steps of this part of what is in use: few blocks, and at most 1/128 too much
_STEPS = 128


@dataclass(frozen=True)
class Segment:
    """A piece of a block.

    Attributes:
        block: Which block.
        start: First byte.
        end: One past the last byte.
        pending: Copies that may still be under way there.
    """

    block: int
    start: int
    end: int
    pending: tuple[torch.Event, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start


class PinnedPool:
    """Page-locked memory for caches, kept for the next ones when they are freed.

    Holds at most 1/128 (or a page) more than the largest sum of payloads that was in use at a
    time, and allocates nothing while that does not grow. Without an accelerator, and where
    page-locking fails (with one warning), the memory is pageable; everything else is the same.
    May be used from several threads.

    Args:
        limit: Bytes that the pool may hold; None is no limit. Checked before memory is taken.

    Raises:
        TypeError: `limit` is no int.
        ValueError: `limit` is negative.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"PinnedPool: limit must be an int or None, got {limit!r}")
        if limit is not None and limit < 0:
            raise ValueError(f"PinnedPool: limit must be at least 0, got {limit}")
        self._limit = limit
        self._pinned = torch.accelerator.is_available()
        self._blocks: dict[int, Tensor] = {}
        self._made = 0
        self._free: list[Segment] = []
        # garbage collection may hand back at any line of this file: it only appends here
        self._returned: deque[Segment] = deque()
        self._lock = threading.Lock()

    @property
    def limit(self) -> int | None:
        """Bytes that the pool may hold."""
        return self._limit

    @property
    def pinned(self) -> bool:
        """Whether what the pool allocates next will be page-locked."""
        return self._pinned

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds, lent or free."""
        with self._lock:
            return self._held()

    @property
    def used_nbytes(self) -> int:
        """Bytes that caches hold now."""
        with self._lock:
            self._drain()
            return self._used()

    def release(self) -> None:
        """Give blocks back to the system of which no byte is lent."""
        with self._lock:
            self._drain()
            whole = {s.block for s in self._free if s.nbytes == self._blocks[s.block].numel()}
            self._free = [s for s in self._free if s.block not in whole]
            # copies under way: torch's own allocator keeps the memory until they end
            for block in whole:
                del self._blocks[block]
        # torch keeps what it is given, and where it can be asked lets go
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None and self._pinned:
            empty()

    def lend(self, nbytes: int) -> list[Segment]:
        """Memory for a payload, in the order in which it is to be filled.

        Whoever writes to it waits for each segment's `pending` first, and gives it back with
        `take_back`.

        Raises:
            ValueError: The pool would hold more than its limit.
        """
        need = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._drain()
            missing = need - sum(s.nbytes for s in self._free)
            if missing > 0:
                self._grow(missing, nbytes)
            return self._cut(need)

    def take_back(self, segments: Iterable[Segment]) -> None:
        """Take lent memory back; `pending` of each names the copies that may be under way."""
        self._returned.extend(segments)
        # not a wait: this thread may be inside `lend`, which then does it
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def view(self, segment: Segment) -> Tensor:
        """The bytes of a segment."""
        return self._blocks[segment.block][segment.start : segment.end]

    def _held(self) -> int:
        return sum(block.numel() for block in self._blocks.values())

    def _used(self) -> int:
        return self._held() - sum(s.nbytes for s in self._free)

    def _drain(self) -> None:
        """Join what was handed back to the free segments, neighbours to one."""
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda s: (s.block, s.start))
        joined: list[Segment] = []
        for segment in self._free:
            # an event of a stream that several caches used comes once
            pending = tuple({id(e): e for e in segment.pending if not e.query()}.values())
            if joined and (joined[-1].block, joined[-1].end) == (segment.block, segment.start):
                left = joined.pop()
                pending = tuple({id(e): e for e in (*left.pending, *pending)}.values())
                joined.append(Segment(segment.block, left.start, segment.end, pending))
            else:
                joined.append(Segment(segment.block, segment.start, segment.end, pending))
        self._free = joined

    def _cut(self, need: int) -> list[Segment]:
        """Take free segments: the smallest that is enough, or else the largest and go on."""
        taken = []
        while need:
            enough = [s for s in self._free if s.nbytes >= need]
            one = (
                min(enough, key=lambda s: s.nbytes)
                if enough
                else max(self._free, key=lambda s: s.nbytes)
            )
            self._free.remove(one)
            end = min(one.end, one.start + need)
            taken.append(Segment(one.block, one.start, end, one.pending))
            if end < one.end:
                self._free.append(Segment(one.block, end, one.end, one.pending))
            need -= end - one.start
        return taken

    def _grow(self, missing: int, payload: int) -> None:
        held, used = self._held(), self._used()
        step = _power_of_two((held + missing) // _STEPS)
        size = -(-missing // step) * step
        if self._limit is not None and held + size > self._limit:
            # a step's rounding alone is no reason to refuse
            step = PAGE_BYTES
            size = -(-missing // step) * step
            if held + size > self._limit:
                raise ValueError(
                    f"PinnedPool: a payload of {payload} bytes, with {used} bytes in use by other "
                    f"caches, needs {held + size} bytes of host memory, and the limit is "
                    f"{self._limit}; free caches earlier, store fewer rows at a time, or raise "
                    "PinnedPool(limit=...)"
                )
        while size:
            block = min(MAX_BLOCK_BYTES, 1 << (size.bit_length() - 1))
            self._blocks[self._made] = self._allocate(block)
            self._free.append(Segment(self._made, 0, block))
            self._made += 1
            size -= block

    def _allocate(self, nbytes: int) -> Tensor:
        # a tensor of inference mode could not be written outside it, and a block outlives the mode
        with torch.inference_mode(False):
            if self._pinned:
                try:
                    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                except RuntimeError as error:
                    self._pinned = False
                    warnings.warn(
                        f"PinnedPool: {nbytes} more bytes could not be page-locked, with "
                        f"{self._held()} held ({error}); going on with pageable memory, whose "
                        "copies are slower and wait. Raise the limit of locked memory (ulimit -l) "
                        "or the container's memory",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


_default: PinnedPool | None = None
_default_lock = threading.Lock()


def default_pool() -> PinnedPool:
    """The pool of all caches that are given no other, made when first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = PinnedPool()
        return _default


def _power_of_two(nbytes: int) -> int:
    """The largest power of two up to `nbytes`, between a page and the largest block."""
    return min(MAX_BLOCK_BYTES, max(PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 1)))
