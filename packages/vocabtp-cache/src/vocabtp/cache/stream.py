"""Several saved caches, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vocabtp.cache._ahead import PREFETCH_BYTES
from vocabtp.cache._checks import check_budget, check_entry
from vocabtp.cache._entries import count_entries
from vocabtp.cache._streams import resolve
from vocabtp.cache.logits import TeacherLogitCache
from vocabtp.cache.pool import PinnedPool
from vocabtp.dist import VocabShard


class TeacherLogitStream:
    """The caches of a directory, in the order of their entries.

        for step, cache in enumerate(TeacherLogitStream(directory, shard)):
            loss = distill(student_logits[step], cache)

    While one cache is in use a thread opens the next, which reads its files once and so brings
    them into memory. A cache is freed when the next one is asked for.

    Args:
        directory: What `TeacherLogitCache.save` was given.
        shard: As for `TeacherLogitCache.open`.
        device: As for `TeacherLogitCache.open`.
        verify: As for `TeacherLogitCache.open`.
        teacher: As for `TeacherLogitCache.open`.
        pool: As for `TeacherLogitCache.open`.
        prefetch_bytes: As for `TeacherLogitCache.open`.

    Raises:
        TypeError: `prefetch_bytes` is no int.
        ValueError: `prefetch_bytes` is negative, the directory holds no cache, or one is missing
            between others.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        shard: VocabShard | None = None,
        *,
        device: torch.device | str | None = None,
        verify: bool = True,
        teacher: str | None = None,
        pool: PinnedPool | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> None:
        check_budget("TeacherLogitStream:", prefetch_bytes)
        self._directory = Path(directory)
        # here and not in the thread, which has a current device of its own
        self._shard, self._device = shard, None if device is None else resolve(device)
        self._verify, self._teacher, self._pool = verify, teacher, pool
        self._prefetch_bytes = prefetch_bytes
        self._count = count_entries(self._directory)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, entry: int) -> TeacherLogitCache:
        """One cache, which the caller frees.

        Raises:
            TypeError: `entry` is no int.
            IndexError: There is no such entry.
            ValueError: As for `TeacherLogitCache.open`.
        """
        check_entry("TeacherLogitStream:", entry)
        if entry >= self._count:
            raise IndexError(f"TeacherLogitStream: entry must be below {self._count}, got {entry}")
        return TeacherLogitCache.open(
            self._directory,
            self._shard,
            entry=entry,
            device=self._device,
            verify=self._verify,
            teacher=self._teacher,
            pool=self._pool,
            prefetch_bytes=self._prefetch_bytes,
        )

    def __iter__(self) -> Iterator[TeacherLogitCache]:
        with ThreadPoolExecutor(1, "vocabtp-cache") as ahead:
            following = ahead.submit(self.__getitem__, 0)
            try:
                for entry in range(1, self._count + 1):
                    with following.result() as cache:
                        if entry < self._count:
                            following = ahead.submit(self.__getitem__, entry)
                        yield cache
            finally:
                # left early: what was opened ahead has no other owner
                if following.exception() is None:
                    following.result().free()
