"""Which chunks of a cache are on their way to a device: never more bytes than the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vocabtp.cache._streams import Arrival, is_accelerator, side_stream

# two gigabytes: 8192 rows of 75,968 bf16 columns, behind a student's forward
PREFETCH_BYTES = 2 << 30

Key = tuple[int, int, torch.device]
# makes an empty tensor for a range; fills it on the current stream of its device
Room = Callable[[Key], Tensor]
Fill = Callable[[Key, Tensor], None]


@dataclass
class Plan:
    """A range that a reader will ask for in order, `chunk` at a time."""

    at: int
    end: int
    chunk: int
    device: torch.device

    def keys(self) -> list[Key]:
        """The chunks from `at`."""
        starts = range(self.at, self.end, self.chunk)
        return [(a, min(a + self.chunk, self.end), self.device) for a in starts]


class Ahead:
    """Chunks that were asked for before they are fetched.

    Args:
        budget: Bytes of them at a time.
        unit: Bytes of one row, or of one position of all sequences.
    """

    def __init__(self, budget: int, unit: int) -> None:
        self.budget, self._unit = budget, unit
        self._arrivals: dict[Key, Arrival] = {}
        # dropped while their copies were under way: they take memory until these end
        self._leaving: list[Arrival] = []
        self._plan: Plan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on their way or waiting."""
        self._leaving = [arrival for arrival in self._leaving if not arrival.ended()]
        return sum(arrival.nbytes for arrival in (*self._arrivals.values(), *self._leaving))

    def __len__(self) -> int:
        return len(self._arrivals)

    def clear(self) -> None:
        """Drop them all, and what was planned."""
        self._arrivals.clear()
        self._leaving.clear()
        self._plan = None

    def take(self, key: Key) -> Tensor | None:
        """A chunk that was asked for, safe on the current stream; None if it was not."""
        plan = self._plan
        if plan is not None and key[2] == plan.device and key[0] <= plan.at < key[1]:
            # the reader was faster
            plan.at = min(plan.end, -(-(key[1] - plan.at) // plan.chunk) * plan.chunk + plan.at)
        arrival = self._arrivals.pop(key, None)
        return None if arrival is None else arrival.take()

    def ask(self, key: Key, room: Room, fill: Fill) -> None:
        """Start the copy of one chunk; older ones make way, but for those still being copied."""
        if key in self._arrivals:
            return
        missing, gone = self.nbytes + self._bytes(key) - self.budget, []
        for old, arrival in self._arrivals.items():
            if missing > 0 and arrival.ended():
                missing -= arrival.nbytes
                gone.append(old)
        if missing > 0:
            return
        for old in gone:
            del self._arrivals[old]
        self._start([key], room, fill)

    def plan(self, plan: Plan, room: Room, fill: Fill) -> None:
        """Start on a range that will be read in order; what is not of it makes way."""
        self._plan = plan
        wanted = set(plan.keys())
        for key in [key for key in self._arrivals if key not in wanted]:
            self._leaving.append(self._arrivals.pop(key))
        self.go_on(room, fill)

    def go_on(self, room: Room, fill: Fill) -> None:
        """Start as many of the planned chunks as the budget allows now."""
        plan = self._plan
        if plan is None:
            return
        keys, free = [], self.budget - self.nbytes
        while plan.at < plan.end:
            key = plan.at, min(plan.at + plan.chunk, plan.end), plan.device
            if key not in self._arrivals:
                free -= self._bytes(key)
                if free < 0:
                    break
                keys.append(key)
            plan.at = key[1]
        self._start(keys, room, fill)

    def room_now(self, key: Key, room: Room) -> Tensor:
        """An empty tensor for a chunk that nobody asked for; where memory is short others go."""
        try:
            return room(key)
        except torch.OutOfMemoryError:
            if not self._arrivals and not self._leaving:
                raise
        self.clear()
        return room(key)

    def _bytes(self, key: Key) -> int:
        return (key[1] - key[0]) * self._unit

    def _start(self, keys: list[Key], room: Room, fill: Fill) -> None:
        """Start the copies of chunks to one device; none of them where it has no room for all."""
        if not keys:
            return
        device = keys[0][2]
        rooms: dict[Key, Tensor] = {}
        out: Tensor | None = None
        arrival: Arrival | None = None
        try:
            try:
                for key in keys:
                    rooms[key] = room(key)
            except torch.OutOfMemoryError:
                # whoever needs the memory now has what is left of it, and fetch copies in place
                self._plan = None
                return
            if not is_accelerator(device):
                for key, out in rooms.items():
                    fill(key, out)
                    self._arrivals[key] = Arrival(out)
                return
            side, home = side_stream(device, "in"), torch.accelerator.current_stream(device)
            # a room may be what a reader queued before this has just left
            side.wait_stream(home)
            with side:
                for key, out in rooms.items():
                    arrival = Arrival(out, side, home)
                    fill(key, out)
                    arrival.filled()
                    self._arrivals[key] = arrival
        finally:
            # a traceback may outlive this
            rooms.clear()
            out = arrival = None
