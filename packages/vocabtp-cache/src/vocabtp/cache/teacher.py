"""The teacher's distribution between its forward pass and the student's loss: what all kinds share.

A teacher's logits of one step are too large to keep on the device while the student runs
(8192 rows of 75,968 bf16 columns are 1.2 GB). A cache keeps them, or what they can be made of,
in host memory, pinned if they came from an accelerator, and brings them back a chunk at a time.
Nothing here communicates: every rank caches its own shard.

Letters: N rows, B sequences, T positions, L columns of this shard.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vocabtp.cache._ahead import Ahead, Key, Plan
from vocabtp.cache._checks import DTYPES, check_chunk, check_entry, check_range, columns
from vocabtp.cache._departure import Landing, send
from vocabtp.cache._entries import MappedRows, new_part, write_part
from vocabtp.cache._identity import Identity
from vocabtp.cache._payload import Payload
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import is_accelerator, resolve, wait
from vocabtp.cache.pool import PinnedPool, default_pool
from vocabtp.dist import VocabShard

# what save() holds of the rows at a time
_SAVE_BYTES = 32 << 20


class TeacherCache:
    """This rank's columns of a teacher's logits, off the device until they are fetched.

    The kinds are `TeacherLogitCache` and `TeacherHiddenCache`; they differ in what waits on the
    host and in `store`. As a context manager a cache is freed at the end of the block, also when
    the block raises:

        with TeacherLogitCache.store(teacher_logits, shard) as cache:
            cache.prefetch(0, len(cache), chunk=512)
            for start in range(0, len(cache), 512):
                chunk = cache.fetch(start, min(start + 512, len(cache)))

    `len(cache)` is what ranges count: N rows of `[N, L]`, T positions of `[B, T, L]`.
    """

    def __init__(
        self,
        host: HostRows | MappedRows,
        payload: Payload,
        shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype],
        shard: VocabShard | None,
        identity: Identity,
        prefetch_bytes: int,
    ) -> None:
        self._host: HostRows | MappedRows | None = host
        self._payload = payload
        self._shape = shape
        # of the rows on the host; of what fetch returns
        self._stored_dtype, self._dtype = dtypes
        self._shard = shard
        self._identity = identity
        self._device = torch.device("cpu")
        self._landings: list[Landing] = []
        per_position = shape[:-2].numel() * self.row_nbytes
        self._ahead = Ahead(prefetch_bytes, per_position)

    @classmethod
    def _sent(
        cls,
        source: Tensor,
        payload: Payload,
        dtypes: tuple[torch.dtype, torch.dtype],
        shard: VocabShard | None,
        identity: Identity,
        prefetch_bytes: int,
        *,
        columns: int,
        donated: bool,
        pool: PinnedPool | None,
    ) -> Self:
        """A cache of these rows, whose copies are on their way to the host."""
        with torch.no_grad():
            device = source.device
            rows = source.detach()
            rows = rows if rows.dim() == 3 else rows.unsqueeze(0)
            if pool is None and is_accelerator(device):
                pool = default_pool()
            host = HostRows(rows.shape[0] * rows.shape[1], payload.width, dtypes[0], pool)
            shape = torch.Size((*source.shape[:-1], columns))
            cache = cls(host, payload, shape, dtypes, shard, identity, prefetch_bytes)
            try:
                cache._device = device
                cache._landings = send(host, rows, dtypes[0], donated=donated)
            except BaseException:
                cache.free()
                raise
        return cache

    def save(self, directory: str | os.PathLike[str], *, entry: int = 0) -> None:
        """Write the columns to files that `TeacherLogitCache.open` reads, at any TP size.

        What is written is what `fetch` returns, whatever the kind. Every rank of the shard's group
        saves to the same directory, each its own columns: one safetensors file and, when that is
        complete and on the disk, its index. A save that did not end leaves an entry that `open`
        refuses, and every other entry as it was. Nothing is overwritten. An empty shard writes
        nothing.

        Args:
            directory: Made if it does not exist.
            entry: Number of this cache in the directory, from 0.

        Raises:
            TypeError: `entry` is no int.
            ValueError: The cache was freed, `entry` is negative, or the directory holds columns
                of this shard under this entry.
            OSError: The files could not be written.
        """
        host = self._open("save")
        check_entry(self._where("save"), entry)
        shard, width = self._shard, self._shape[-1]
        if shard is not None and not width and shard.global_size:
            return
        bounds = (0, width, None) if shard is None else (shard.start, shard.end, shard.global_size)
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        part = new_part(entry, tuple(self._shape), self._dtype, bounds, self._identity)
        write_part(folder, part, self._dtype, self._chunks(host))

    def check(
        self,
        shard: VocabShard | None = None,
        *,
        teacher: str | None = None,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Refuse to serve anyone but whom the cache was filled for.

        What is None is not compared. What the cache was not told when it was filled matches
        nothing.

        Args:
            shard: Must equal the cache's.
            teacher: Must be the name given to `store`.
            tokens: Must be the ids given to `store`, in their shape; any integer type.
            positions: Likewise.

        Raises:
            TypeError: As for `store`.
            ValueError: Something differs; the message says what.
        """
        where = self._where("check")
        self._check_shard(where, shard)
        expected = Identity.of(where, teacher, tokens, positions)
        if problem := self._identity.mismatch(expected):
            raise ValueError(f"{where} {problem}; store the logits of these again")

    def fetch(
        self,
        start: int,
        end: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        shard: VocabShard | None = None,
    ) -> Tensor:
        """Rows `[start, end)`, or these positions of every sequence, on a device.

        What comes back belongs to the caller, who may write to it; the cache keeps its own.
        On an accelerator it is ready for work queued on the current stream, without a wait
        of the host. A range that was prefetched to this device is handed over; any other is
        copied now. Then as many chunks of what `prefetch(chunk=)` announced start on their way
        as the budget allows.

        Args:
            start: First row or position, at least 0.
            end: One past the last, at most `len(cache)`. Equal to `start` gives no rows.
            device: Where to; None is the device that the rows came from.
            dtype: Of the result; None keeps that of the cache. Converted on the device.
            shard: If given, must equal the shard that the cache was filled from.

        Returns:
            `[end - start, L]`, or `[B, end - start, L]`; contiguous, without grad.

        Raises:
            TypeError: `start` or `end` is no int, or `dtype` is not floating.
            ValueError: The cache was freed, the range is out of bounds, or `shard` is another.
        """
        key, target = self._locate("fetch", start, end, device)
        self._check_shard(self._where("fetch"), shard)
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(
                f"{self._where('fetch')} dtype must be bfloat16, float16, float32 or float64, "
                f"got {dtype}"
            )
        # inference mode would mark the chunk, and the loss could not save it for backward
        with torch.inference_mode(False), torch.no_grad():
            rows = self._ahead.take(key)
            if rows is None:
                rows = self._ahead.room_now(key, self._room)
                self._fill(key, rows)
            self._ahead.go_on(self._room, self._fill)
            return self._payload.columns(rows).to(target, self._dtype if dtype is None else dtype)

    def prefetch(
        self,
        start: int,
        end: int,
        device: torch.device | str | None = None,
        *,
        chunk: int | None = None,
    ) -> None:
        """Start the copy of what `fetch` will ask for.

        On an accelerator the copies run on a stream of their own. They start after the work that
        the current stream has been given so far and run beside what comes later, so announce a
        range before queuing the work that hides it. Elsewhere the copies are made at once.
        Chunks that were prefetched and not fetched take `prefetch_bytes` at most, dropped ones
        whose copies are under way included. A prefetch changes what `fetch` costs and never what
        it returns; one that finds no memory on the device does not happen.

        Args:
            start: As for `fetch`.
            end: As for `fetch`.
            device: As for `fetch`.
            chunk: The range will be fetched in order, so many rows or positions at a time: as
                many chunks as the budget allows start now, and one more whenever a `fetch` makes
                room. Replaces what was prefetched of other ranges. None is one chunk; older ones
                that have arrived are dropped where it would not fit, and one that then does not
                fit does not start.

        Raises:
            TypeError: `start`, `end` or `chunk` is no int.
            ValueError: The cache was freed, the range is out of bounds, or `chunk` is below 1.
        """
        key, _ = self._locate("prefetch", start, end, device)
        if chunk is not None:
            check_chunk(self._where("prefetch"), chunk)
        # as in fetch
        with torch.inference_mode(False), torch.no_grad():
            if chunk is None:
                self._ahead.ask(key, self._room, self._fill)
            else:
                self._ahead.plan(Plan(start, end, chunk, key[2]), self._room, self._fill)

    def free(self) -> None:
        """Give the memory back, prefetched ranges included. Freeing twice is fine.

        Copies that are still under way end safely: their memory is kept until then.
        """
        if self._host is not None:
            self._host.release()
        self._host = None
        self._payload.release()
        self._ahead.clear()
        self._landings = []

    @property
    def shape(self) -> torch.Size:
        """`[N, L]` or `[B, T, L]`: of all that can be fetched."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what `fetch` returns."""
        return self._dtype

    @property
    def payload(self) -> str:
        """What waits on the host: "logits" or "hidden"."""
        return self._payload.kind

    @property
    def shard(self) -> VocabShard | None:
        """The columns that the cache was filled from, if `store` was told."""
        return self._shard

    @property
    def identity(self) -> Identity:
        """What the cache was filled from, as far as `store` was told."""
        return self._identity

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row on the host."""
        return self._payload.width * self._stored_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on the host: their number times `row_nbytes`."""
        return self._shape[:-1].numel() * self.row_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the cache holds: `nbytes` or a little more.

        0 once freed, and for an opened cache: pages of its files belong to the system.
        """
        return 0 if self._host is None else self._host.nbytes

    @property
    def prefetch_bytes(self) -> int:
        """Bytes that prefetched chunks take on a device at most."""
        return self._ahead.budget

    @property
    def prefetched_nbytes(self) -> int:
        """Bytes of the chunks that were prefetched and not fetched, as long as they take memory."""
        return self._ahead.nbytes

    @property
    def closed(self) -> bool:
        """Whether the cache was freed."""
        return self._host is None

    def __len__(self) -> int:
        return self._shape[-2]

    def __enter__(self) -> Self:
        self._open("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        state = ", freed" if self.closed else ""
        return f"{type(self).__name__}({list(self._shape)}, {self._dtype}{state})"

    @classmethod
    def _where(cls, what: str) -> str:
        """How an error of this method begins."""
        return f"{cls.__name__}.{what}:"

    def _open(self, what: str) -> HostRows | MappedRows:
        if self._host is None:
            raise ValueError(
                f"{self._where(what)} the cache was freed; read it before free() or the end of "
                "its with block"
            )
        return self._host

    def _locate(
        self, what: str, start: int, end: int, device: torch.device | str | None
    ) -> tuple[Key, torch.device]:
        """Which rows have to be where, and where the result is wanted."""
        self._open(what)
        check_range(self._where(what), start, end, len(self))
        target = self._target(device)
        return (start, end, self._payload.place(target)), target

    def _check_shard(self, where: str, shard: VocabShard | None) -> None:
        if shard is not None and shard != self._shard:
            raise ValueError(
                f"{where} the shard must be the one that the cache was filled from, "
                f"{columns(self._shard)}, got {columns(shard)}; use that one or store the "
                "logits again"
            )

    def _target(self, device: torch.device | str | None) -> torch.device:
        return self._device if device is None else resolve(device)

    def _room(self, key: Key) -> Tensor:
        """An empty tensor for the rows of this range."""
        shape = (*self._shape[:-2], key[1] - key[0], self._payload.width)
        return torch.empty(shape, dtype=self._stored_dtype, device=key[2])

    def _fill(self, key: Key, out: Tensor) -> None:
        """Copy this range to `out`, on the current stream of its device."""
        host = self._open("fetch")
        start, _, device = key
        for b, rows in enumerate(out if out.dim() == 3 else (out,)):
            first = b * len(self) + start
            self._wait_for(first + rows.shape[0], device)
            host.read(first, rows)

    def _wait_for(self, rows: int, device: torch.device) -> None:
        """Let the device's current stream wait until the first `rows` rows are on the host."""
        at = bisect_left(self._landings, rows, key=lambda landing: landing[0])
        # of an opened cache, or one from the CPU, there are none
        if at < len(self._landings):
            wait(self._landings[at][1], device)

    def _chunks(self, host: HostRows | MappedRows) -> Iterator[Tensor]:
        """The columns in row order, `_SAVE_BYTES` at a time; each until the next is asked for."""
        width, cpu = self._shape[-1], torch.device("cpu")
        rows = self._shape[:-1].numel() if width else 0
        step = max(1, min(rows, _SAVE_BYTES // max(1, width * self._dtype.itemsize)))
        place = self._payload.place(cpu)
        room = torch.empty(step, self._payload.width, dtype=self._stored_dtype, device=place)
        self._wait_for(rows, place)
        for start in range(0, rows, step):
            piece = room[: min(step, rows - start)]
            host.read(start, piece)
            yield self._payload.columns(piece).to(cpu, self._dtype)
