"""The teacher's distribution between its forward pass and the student's loss.

A teacher's logits of one step are too large to keep on the device while the student runs
(8192 rows of 75,968 bf16 columns are 1.2 GB). `TeacherLogitCache` keeps this rank's columns
in host memory, pinned if they came from an accelerator, and brings them back a chunk at a
time. Nothing here communicates: every rank caches its own shard.

Letters: N rows, B sequences, T positions, L columns of this shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vocabtp.cache._checks import DTYPES, check_entry, check_range, check_source, columns
from vocabtp.cache._entries import MappedRows, new_part, read_entry, write_part
from vocabtp.cache._files import DTYPE_OF
from vocabtp.cache._identity import Identity
from vocabtp.cache._pinned import Arrival, HostRows, is_accelerator, mark, resolve, wait
from vocabtp.cache.pool import PinnedPool, default_pool
from vocabtp.dist import VocabShard

# the current chunk and the next: more would defeat the purpose of the cache
_PREFETCH_DEPTH = 2
# what save() holds of the rows at a time
_SAVE_BYTES = 32 << 20

_Key = tuple[int, int, torch.device]


class TeacherLogitCache:
    """This rank's columns of a teacher's logits, in host memory.

    Made by `store` or `open`, read by `fetch`, emptied by `free`. As a context manager it is
    freed at the end of the block, also when the block raises:

        with TeacherLogitCache.store(teacher_logits, shard) as cache:
            for start in range(0, len(cache), 512):
                chunk = cache.fetch(start, min(start + 512, len(cache)))

    `len(cache)` is what ranges count: N rows of `[N, L]`, T positions of `[B, T, L]`.
    """

    def __init__(
        self,
        host: HostRows | MappedRows,
        shape: torch.Size,
        dtype: torch.dtype,
        shard: VocabShard | None,
        identity: Identity,
    ) -> None:
        self._host: HostRows | MappedRows | None = host
        self._shape = shape
        self._dtype = dtype
        self._shard = shard
        self._identity = identity
        self._device = torch.device("cpu")
        self._stored: torch.Event | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._arrivals: dict[_Key, Arrival] = {}

    @classmethod
    def store(
        cls,
        logits: Tensor,
        shard: VocabShard | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        teacher: str | None = None,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        pool: PinnedPool | None = None,
    ) -> Self:
        """Copy a teacher's logits to host memory.

        The rows are copied, never aliased: the source may be overwritten or freed right
        after. From an accelerator the copy is queued on its current stream and not waited
        for; whoever writes to the source on another stream orders the two as usual.

        Args:
            logits: `[N, L]` packed rows or `[B, T, L]`, of any strides, floating, on any
                device. Detached if it requires grad. N, B, T and L may be 0.
            shard: The columns that these are. `fetch` refuses another one.
            dtype: What the rows are kept as: bfloat16, float16, float32 or float64.
                Conversion rounds and overflows as `Tensor.to` does.
            teacher: Name of the model, for `check` and `save`.
            tokens: The ids that the teacher read, integers of any shape; only their digest is
                kept. Reading them waits for an accelerator that they are on.
            positions: Where the rows come from, integers or a mask, likewise.
            pool: Who lends the host memory. None is the process's own `default_pool()` for rows
                from an accelerator, and memory of this cache alone for rows from the CPU.

        Returns:
            The filled cache.

        Raises:
            TypeError: `logits` is no plain floating tensor, `shard` no `VocabShard`, `dtype`
                none of the four, `teacher` no string, or ids are no integers.
            ValueError: `logits` has another number of dimensions, or a last dimension other
                than `shard.width`, or the pool's limit forbids it.
        """
        check_source(logits, shard, dtype)
        identity = Identity.of("TeacherLogitCache.store:", teacher, tokens, positions)
        with torch.no_grad():
            sequences = logits if logits.dim() == 3 else logits.unsqueeze(0)
            batch, length, width = sequences.shape
            device = logits.device
            if pool is None and is_accelerator(device):
                pool = default_pool()
            host = HostRows(batch * length, width, dtype, pool)
            cache = cls(host, logits.shape, dtype, shard, identity)
            try:
                for b in range(batch):
                    host.write(b * length, sequences[b].detach())
                cache._device = device
                cache._stored = mark(device)
            except BaseException:
                cache.free()
                raise
        return cache

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        shard: VocabShard | None = None,
        *,
        entry: int = 0,
        device: torch.device | str | None = None,
        verify: bool = True,
        teacher: str | None = None,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        pool: PinnedPool | None = None,
    ) -> Self:
        """A cache that `save` wrote, its rows read from the files when they are asked for.

        Args:
            directory: What `save` was given.
            shard: The columns to read, of whatever ranks wrote them; None for all columns.
            entry: Which cache of the directory.
            device: Where `fetch` brings rows by default; None is the CPU.
            verify: Compare the files that hold these columns with their checksums, which reads
                them once. Sizes and indexes are checked in any case.
            teacher: If given, must be the name that the cache was stored with.
            tokens: Likewise.
            positions: Likewise.
            pool: Through whose memory rows go to an accelerator; None is `default_pool()`.

        Returns:
            The cache, of the shape that was stored apart from the width.

        Raises:
            TypeError: As for `store`, or `entry` is no int.
            ValueError: The entry is missing, incomplete, truncated or altered (the message names
                the file), is of another vocabulary than `shard`, or of another identity.
        """
        where = "TeacherLogitCache.open:"
        check_entry(where, entry)
        expected = Identity.of(where, teacher, tokens, positions)
        folder = Path(directory)
        parts = read_entry(folder, entry)
        first = parts[0]
        whole = parts[-1].end
        if shard is None and first.global_size is not None:
            shard = VocabShard(0, whole, whole)
        if shard is not None and shard.global_size != whole:
            raise ValueError(
                f"{where} entry {entry} of {folder} holds a vocabulary of {whole} columns, got "
                f"{columns(shard)}"
            )
        start, end = (0, whole) if shard is None else (shard.start, shard.end)
        if problem := first.identity.mismatch(expected):
            raise ValueError(f"{where} entry {entry} of {folder}: {problem}")
        host = MappedRows(folder, parts, start, end, verify=verify, pool=pool)
        shape = torch.Size((*first.shape[:-1], end - start))
        cache = cls(host, shape, DTYPE_OF[first.dtype], shard, first.identity)
        cache._device = cache._target(device)
        return cache

    def save(self, directory: str | os.PathLike[str], *, entry: int = 0) -> None:
        """Write the rows to files that `open` reads, at this or any other TP size.

        Every rank of the shard's group saves to the same directory, each its own columns: one
        safetensors file and, when that is complete and on the disk, its index. A save that did
        not end leaves an entry that `open` refuses, and every other entry as it was. Nothing is
        overwritten. An empty shard writes nothing.

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
        check_entry("TeacherLogitCache.save:", entry)
        shard, width = self._shard, self._shape[-1]
        if shard is not None and not width and shard.global_size:
            return
        bounds = (0, width, None) if shard is None else (shard.start, shard.end, shard.global_size)
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        part = new_part(entry, tuple(self._shape), self._dtype, bounds, self._identity)
        wait(self._stored, torch.device("cpu"))
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
        where = "TeacherLogitCache.check:"
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
        copied now.

        Args:
            start: First row or position, at least 0.
            end: One past the last, at most `len(cache)`. Equal to `start` gives no rows.
            device: Where to; None is the device that the rows came from.
            dtype: Of the result; None keeps the stored one.
            shard: If given, must equal the shard that the cache was filled from.

        Returns:
            `[end - start, L]`, or `[B, end - start, L]`; contiguous, without grad.

        Raises:
            TypeError: `start` or `end` is no int, or `dtype` is not floating.
            ValueError: The cache was freed, the range is out of bounds, or `shard` is another.
        """
        key, host = self._locate("fetch", start, end, device)
        self._check_shard("TeacherLogitCache.fetch:", shard)
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(
                "TeacherLogitCache.fetch: dtype must be bfloat16, float16, float32 or float64, "
                f"got {dtype}"
            )
        # inference mode would mark the chunk, and the loss could not save it for backward
        with torch.inference_mode(False), torch.no_grad():
            arrival = self._arrivals.pop(key, None)
            if arrival is None:
                chunk = self._room(key)
                self._fill(host, key, chunk)
            else:
                chunk = arrival.take()
            return chunk if dtype is None else chunk.to(dtype)

    def prefetch(self, start: int, end: int, device: torch.device | str | None = None) -> None:
        """Start the copy of a range that `fetch` will ask for.

        On an accelerator the copy runs on a stream of its own. It starts after the work that
        the current stream has been given so far and runs beside what comes later, so ask for
        the next range before queuing the work on this one. Elsewhere the copy is made at once.
        The cache holds two prefetched ranges
        at most and drops the older one for a third. A prefetch changes what `fetch` costs
        and never what it returns.

        Args:
            start: As for `fetch`.
            end: As for `fetch`.
            device: As for `fetch`.

        Raises:
            TypeError: `start` or `end` is no int.
            ValueError: The cache was freed, or the range is out of bounds.
        """
        key, host = self._locate("prefetch", start, end, device)
        if key in self._arrivals:
            return
        while len(self._arrivals) >= _PREFETCH_DEPTH:
            del self._arrivals[next(iter(self._arrivals))]
        target = key[2]
        # as in fetch
        with torch.inference_mode(False), torch.no_grad():
            out = self._room(key)
            if not is_accelerator(target):
                self._fill(host, key, out)
                self._arrivals[key] = Arrival(out)
                return
            if target not in self._streams:
                self._streams[target] = torch.Stream(target)
            side, home = self._streams[target], torch.accelerator.current_stream(target)
            # the room may be what a reader queued before this has just left
            side.wait_stream(home)
            with side:
                self._fill(host, key, out)
                self._arrivals[key] = Arrival(out, side, home)

    def free(self) -> None:
        """Give the memory back, prefetched ranges included. Freeing twice is fine.

        Copies that are still under way end safely: their memory is kept until then.
        """
        if self._host is not None:
            self._host.release()
        self._host = None
        self._arrivals.clear()
        self._streams.clear()
        self._stored = None

    @property
    def shape(self) -> torch.Size:
        """`[N, L]` or `[B, T, L]`, as stored."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """What the rows are kept as."""
        return self._dtype

    @property
    def shard(self) -> VocabShard | None:
        """The columns that the cache was filled from, if `store` was told."""
        return self._shard

    @property
    def identity(self) -> Identity:
        """What the cache was filled from, as far as `store` was told."""
        return self._identity

    @property
    def nbytes(self) -> int:
        """Bytes of the rows: the product of `shape` times the size of an element."""
        return self._shape.numel() * self._dtype.itemsize

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the cache holds: `nbytes` or a little more.

        0 once freed, and for an opened cache: pages of its files belong to the system.
        """
        return 0 if self._host is None else self._host.nbytes

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
        return f"TeacherLogitCache({list(self._shape)}, {self._dtype}{state})"

    def _open(self, what: str) -> HostRows | MappedRows:
        if self._host is None:
            raise ValueError(
                f"TeacherLogitCache.{what}: the cache was freed; read it before free() or the "
                "end of its with block"
            )
        return self._host

    def _locate(
        self, what: str, start: int, end: int, device: torch.device | str | None
    ) -> tuple[_Key, HostRows | MappedRows]:
        host = self._open(what)
        check_range(f"TeacherLogitCache.{what}:", start, end, len(self))
        return (start, end, self._target(device)), host

    def _check_shard(self, where: str, shard: VocabShard | None) -> None:
        if shard is not None and shard != self._shard:
            raise ValueError(
                f"{where} the shard must be the one that the cache was filled from, "
                f"{columns(self._shard)}, got {columns(shard)}; use that one or store the "
                "logits again"
            )

    def _target(self, device: torch.device | str | None) -> torch.device:
        return self._device if device is None else resolve(device)

    def _room(self, key: _Key) -> Tensor:
        """An empty tensor for this range, in the stored dtype."""
        shape = (*self._shape[:-2], key[1] - key[0], self._shape[-1])
        return torch.empty(shape, dtype=self._dtype, device=key[2])

    def _fill(self, host: HostRows | MappedRows, key: _Key, out: Tensor) -> None:
        """Copy this range to `out`, on the current stream of its device."""
        start, _, target = key
        wait(self._stored, target)
        if out.dim() == 2:
            host.read(start, out)
            return
        for b in range(out.shape[0]):
            host.read(b * len(self) + start, out[b])

    def _chunks(self, host: HostRows | MappedRows) -> Iterator[Tensor]:
        """The rows in order, `_SAVE_BYTES` at a time; each piece until the next is asked for."""
        width = self._shape[-1]
        rows = self._shape[:-1].numel() if width else 0
        step = max(1, min(rows, _SAVE_BYTES // max(1, width * self._dtype.itemsize)))
        room = torch.empty(step, width, dtype=self._dtype, device="cpu")
        for start in range(0, rows, step):
            piece = room[: min(step, rows - start)]
            host.read(start, piece)
            yield piece
