"""Payload `logits`: the columns themselves wait on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from vocabtp.cache._ahead import PREFETCH_BYTES
from vocabtp.cache._checks import check_budget, check_entry, check_source, check_width, columns
from vocabtp.cache._entries import MappedRows, read_entry
from vocabtp.cache._files import DTYPE_OF
from vocabtp.cache._identity import Identity
from vocabtp.cache._payload import Logits
from vocabtp.cache.pool import PinnedPool
from vocabtp.cache.teacher import TeacherCache
from vocabtp.dist import VocabShard


class TeacherLogitCache(TeacherCache):
    """This rank's columns of a teacher's logits, in host memory or in files.

    Made by `store` or `open`. A row takes L numbers of the stored dtype, and comes back bit for
    bit as it was rounded to that.
    """

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
        prefetch_bytes: int = PREFETCH_BYTES,
        donate: bool = False,
    ) -> Self:
        """Copy a teacher's logits to host memory.

        The rows are copied, never aliased: the source may be overwritten or freed right
        after. From an accelerator the copies run on a side stream, behind what the current
        stream was given and beside what it is given next, and are not waited for; whoever
        writes to the source on another stream orders the two as usual.

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
            prefetch_bytes: Bytes that prefetched chunks may take on a device; 0 is no prefetch.
            donate: `logits` will not be written to any more, though it may be dropped. On an
                accelerator the rows then need no copy there: otherwise they pass through 256 MiB
                of buffers, and of a larger source the current stream waits for the rest.

        Returns:
            The filled cache.

        Raises:
            TypeError: `logits` is no plain floating tensor, `shard` no `VocabShard`, `dtype`
                none of the four, `teacher` no string, or ids are no integers.
            ValueError: `logits` has another number of dimensions, or a last dimension other
                than `shard.width`, or the pool's limit forbids it, or `prefetch_bytes` is negative.
        """
        where = cls._where("store")
        check_source(where, "logits", logits, dtype)
        check_width(where, logits, shard)
        check_budget(where, prefetch_bytes)
        identity = Identity.of(where, teacher, tokens, positions)
        width = logits.shape[-1]
        return cls._sent(
            logits,
            Logits(width),
            (dtype, dtype),
            shard,
            identity,
            prefetch_bytes,
            columns=width,
            donated=donate,
            pool=pool,
        )

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
        prefetch_bytes: int = PREFETCH_BYTES,
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
            prefetch_bytes: As for `store`.

        Returns:
            The cache, of the shape that was stored apart from the width.

        Raises:
            TypeError: As for `store`, or `entry` is no int.
            ValueError: The entry is missing, incomplete, truncated or altered (the message names
                the file), is of another vocabulary than `shard`, or of another identity.
        """
        where = cls._where("open")
        check_entry(where, entry)
        check_budget(where, prefetch_bytes)
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
        dtype = DTYPE_OF[first.dtype]
        cache = cls(
            host,
            Logits(end - start),
            shape,
            (dtype, dtype),
            shard,
            first.identity,
            prefetch_bytes,
        )
        cache._device = cache._target(device)
        return cache
