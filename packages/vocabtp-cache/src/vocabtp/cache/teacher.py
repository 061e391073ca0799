"""The teacher's distribution between its forward pass and the student's loss.

A teacher's logits of one step are too large to keep on the device while the student runs
(8192 rows of 75,968 bf16 columns are 1.2 GB). `TeacherLogitCache` keeps this rank's columns
in host memory, pinned if they came from an accelerator, and brings them back a chunk at a
time. Nothing here communicates: every rank caches its own shard.

Letters: N rows, B sequences, T positions, L columns of this shard.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vocabtp.cache._checks import DTYPES, check_source, columns
from vocabtp.cache._pinned import Arrival, HostRows, is_accelerator, mark, wait
from vocabtp.dist import VocabShard

# the current chunk and the next: more would defeat the purpose of the cache
_PREFETCH_DEPTH = 2

_Key = tuple[int, int, torch.device]


class TeacherLogitCache:
    """This rank's columns of a teacher's logits, in host memory.

    Made by `store`, read by `fetch`, emptied by `free`. As a context manager it is freed at
    the end of the block, also when the block raises:

        with TeacherLogitCache.store(teacher_logits, shard) as cache:
            for start in range(0, len(cache), 512):
                chunk = cache.fetch(start, min(start + 512, len(cache)))

    `len(cache)` is what ranges count: N rows of `[N, L]`, T positions of `[B, T, L]`.
    """

    def __init__(
        self, host: HostRows, shape: torch.Size, dtype: torch.dtype, shard: VocabShard | None
    ) -> None:
        self._host: HostRows | None = host
        self._shape = shape
        self._dtype = dtype
        self._shard = shard
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

        Returns:
            The filled cache.

        Raises:
            TypeError: `logits` is no plain floating tensor, `shard` no `VocabShard`, or
                `dtype` none of the four.
            ValueError: `logits` has another number of dimensions, or a last dimension other
                than `shard.width`.
        """
        check_source(logits, shard, dtype)
        with torch.no_grad():
            sequences = logits if logits.dim() == 3 else logits.unsqueeze(0)
            batch, length, width = sequences.shape
            device = logits.device
            pinned = is_accelerator(device)
            host = HostRows(batch * length, width, dtype, pinned=pinned)
            cache = cls(host, logits.shape, dtype, shard)
            for b in range(batch):
                host.write(b * length, sequences[b].detach())
            cache._device = device
            cache._stored = mark(device)
        return cache

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
        if shard is not None and shard != self._shard:
            raise ValueError(
                "TeacherLogitCache.fetch: the shard must be the one that the cache was filled "
                f"from, {columns(self._shard)}, got {columns(shard)}; fetch with that one or "
                "store the logits again"
            )
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
    def nbytes(self) -> int:
        """Bytes of the rows: the product of `shape` times the size of an element."""
        return self._shape.numel() * self._dtype.itemsize

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the cache holds: `nbytes` or a little more, 0 once freed."""
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

    def _open(self, what: str) -> HostRows:
        if self._host is None:
            raise ValueError(
                f"TeacherLogitCache.{what}: the cache was freed; read it before free() or the "
                "end of its with block"
            )
        return self._host

    def _locate(
        self, what: str, start: int, end: int, device: torch.device | str | None
    ) -> tuple[_Key, HostRows]:
        host = self._open(what)
        for name, value in (("start", start), ("end", end)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"TeacherLogitCache.{what}: {name} must be an int, "
                    f"got {type(value).__name__} {value!r}"
                )
        if not 0 <= start <= end <= len(self):
            raise ValueError(
                f"TeacherLogitCache.{what}: the range must satisfy 0 <= start <= end <= "
                f"{len(self)}, got start={start}, end={end}"
            )
        return (start, end, self._target(device)), host

    def _target(self, device: torch.device | str | None) -> torch.device:
        if device is None:
            return self._device
        target = torch.device(device)
        # "cuda" and "cuda:0" must find the same prefetched range
        if is_accelerator(target) and target.index is None:
            return torch.device(target.type, torch.accelerator.current_device_index())
        return torch.device("cpu") if target.type == "cpu" else target

    def _room(self, key: _Key) -> Tensor:
        """An empty tensor for this range, in the stored dtype."""
        shape = (*self._shape[:-2], key[1] - key[0], self._shape[-1])
        return torch.empty(shape, dtype=self._dtype, device=key[2])

    def _fill(self, host: HostRows, key: _Key, out: Tensor) -> None:
        """Copy this range to `out`, on the current stream of its device."""
        start, _, target = key
        wait(self._stored, target)
        if out.dim() == 2:
            host.read(start, out)
            return
        for b in range(out.shape[0]):
            host.read(b * len(self) + start, out[b])
