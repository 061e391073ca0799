"""A directory of saved caches: what is in it, and which files make up one cache.

    entry-00000-columns-0-75968.safetensors         rows of one rank
    entry-00000-columns-0-75968.json                their index, written after them
    entry-00000-columns-75968-151936.safetensors    those of its peer
    ...

Each rank writes its own two files, so that saving needs no communication. An entry is what all
its indexes say together: they must agree, and their columns must tile the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocabtp.cache._files import CODES, DTYPE_OF, check_size, map_rows, replacing, write_rows
from vocabtp.cache._identity import Identity
from vocabtp.cache._pinned import HostRows
from vocabtp.cache._streams import is_accelerator, mark
from vocabtp.cache.pool import PinnedPool, default_pool

FORMAT = "vocabtp.cache"
VERSION = 1
_INDEX = re.compile(r"entry-(\d+)-columns-(\d+)-(\d+)\.json")


@dataclass(frozen=True)
class Part:
    """The index of one file.

    Attributes:
        entry: Which cache of the directory.
        shape: Of the rows in the file.
        dtype: Of the rows, as safetensors writes it.
        start: First column.
        end: One past the last column.
        global_size: Columns of the whole vocabulary; None where the cache was told no shard.
        identity: What the cache was filled from.
        file: Name of the file.
        size: Bytes of the file.
        sha256: Of the file.
    """

    entry: int
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int
    global_size: int | None
    identity: Identity
    file: str
    size: int = 0
    sha256: str = ""

    def common(self) -> tuple[object, ...]:
        """What all parts of an entry share."""
        return self.shape[:-1], self.dtype, self.global_size, self.identity


def stem(entry: int, start: int, end: int) -> str:
    """Name of the files of a part, without the ending."""
    return f"entry-{entry:05d}-columns-{start}-{end}"


def indexes(directory: Path, entry: int | None = None) -> list[tuple[Path, int, int, int]]:
    """The index files of one entry, or of all: path, entry, first column, one past the last."""
    found = []
    for path in sorted(directory.glob("entry-*.json")):
        if match := _INDEX.fullmatch(path.name):
            number, start, end = map(int, match.groups())
            if entry in (None, number):
                found.append((path, number, start, end))
    return found


def count_entries(directory: Path) -> int:
    """How many caches a directory holds, numbered from 0.

    Raises:
        ValueError: It is no directory, holds none, or one is missing between others.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory of saved caches")
    numbers = sorted({number for _, number, _, _ in indexes(directory)})
    if not numbers:
        raise ValueError(f"{directory} holds no saved cache")
    for expected, number in enumerate(numbers):
        if number != expected:
            raise ValueError(f"{directory} lacks entry {expected}, though it holds entry {number}")
    return len(numbers)


def write_part(directory: Path, part: Part, dtype: torch.dtype, pieces: Iterator[Tensor]) -> None:
    """Write rows, then their index.

    Raises:
        ValueError: The entry has rows of some of these columns.
    """
    for path, _, start, end in indexes(directory, part.entry):
        shared = max(start, part.start) < min(end, part.end)
        if shared or (start, end) == (part.start, part.end):
            raise ValueError(
                f"TeacherLogitCache.save: entry {part.entry} has columns [{start}, {end}) in "
                f"{path}; save under another entry or remove its files"
            )
    size, sha256 = write_rows(directory / part.file, part.shape, dtype, pieces)
    record = {**asdict(part), "size": size, "sha256": sha256}
    record = {"format": FORMAT, "version": VERSION, **record}
    text = json.dumps({**record, "checksum": _checksum(record)}, indent=1)
    with replacing(directory / f"{stem(part.entry, part.start, part.end)}.json") as file:
        file.write(text.encode() + b"\n")


def read_part(path: Path) -> Part:
    """One index.

    Raises:
        ValueError: It was altered, or is of another format; names it.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        checksum = record.pop("checksum")
        kind = record.pop("format"), record.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} was truncated or altered: it is no index of a cache") from None
    if kind != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {kind}, this version reads {(FORMAT, VERSION)}")
    if checksum != _checksum({"format": FORMAT, "version": VERSION, **record}):
        raise ValueError(f"{path} was altered: its checksum is not that of its text")
    if set(record) != {field.name for field in fields(Part)}:
        raise ValueError(f"{path} was altered: it has other keys than an index")
    record["shape"] = tuple(record["shape"])
    part = Part(**{**record, "identity": Identity(**record["identity"])})
    if path.stem != stem(part.entry, part.start, part.end):
        raise ValueError(f"{path} was renamed: it is the index of {part.file}")
    return part


def read_entry(directory: Path, entry: int) -> list[Part]:
    """The parts of an entry in column order.

    Raises:
        ValueError: There are none, they differ, or their columns do not tile the vocabulary.
    """
    parts = sorted(
        (read_part(path) for path, *_ in indexes(directory, entry)),
        key=lambda part: (part.start, part.end),
    )
    where = f"entry {entry} of {directory}"
    if not parts:
        raise ValueError(f"{where} is not there, or no rank finished saving it")
    first = parts[0]
    whole = first.shape[-1] if first.global_size is None else first.global_size
    at = 0
    for part in parts:
        if part.common() != first.common():
            raise ValueError(
                f"{where} is a mixture: {part.file} and {first.file} differ in rows, dtype, "
                "vocabulary or identity; save it again"
            )
        if part.start != at:
            break
        at = part.end
    if at != whole or parts[-1].end != at:
        shown = ", ".join(f"[{part.start}, {part.end})" for part in parts)
        raise ValueError(
            f"{where} is incomplete: its files hold columns {shown}, not [0, {whole}) once each; "
            "some rank did not finish saving it"
        )
    return parts


class MappedRows:
    """Columns `[start, end)` of an entry, read from its files when they are asked for.

    Args:
        directory: Where the files are.
        parts: Those of the entry, in column order.
        start: First column.
        end: One past the last column.
        verify: Compare each file that is read from with its checksum now.
        pool: Through whose memory rows go to an accelerator; None is the default one.
    """

    nbytes = 0

    def __init__(
        self,
        directory: Path,
        parts: list[Part],
        start: int,
        end: int,
        *,
        verify: bool,
        pool: PinnedPool | None = None,
    ) -> None:
        self._pool = pool
        self._spans: list[tuple[int, Tensor]] = []
        # rows on their way to a device, each with what is behind its copy
        self._stages: deque[tuple[HostRows, torch.Event]] = deque()
        self._most = 0
        for part in parts:
            path, sha256 = directory / part.file, part.sha256 if verify else None
            lo, hi = max(start, part.start), min(end, part.end)
            if lo >= hi and len(parts) > 1:
                # a peer's, but every rank refuses the entry without it
                check_size(path, part.size)
                continue
            rows = map_rows(path, part.shape, DTYPE_OF[part.dtype], part.size, sha256)
            columns = rows.flatten(0, -2)[:, lo - part.start : hi - part.start]
            self._spans.append((lo - start, columns))
            self._most += columns.numel() * columns.element_size()

    def read(self, start: int, out: Tensor) -> None:
        """Copy the rows from `start` to `out`, `[n, L]` contiguous, on its current stream."""
        if not out.numel():
            return
        end = start + out.shape[0]
        if not is_accelerator(out.device):
            for offset, columns in self._spans:
                out[:, offset : offset + columns.shape[1]].copy_(columns[start:end])
            return
        # pages of a file cannot be copied from beside other work
        rows = [columns[start:end] for _, columns in self._spans]
        stage = self._stage(out)
        try:
            stage.write(0, rows[0] if len(rows) == 1 else torch.cat(rows, dim=1))
            stage.read(0, out)
        except BaseException:
            stage.release()
            raise
        # kept until then, and not lent to the next rows, for which this thread would wait
        self._stages.append((stage, mark(out.device)))

    def _stage(self, out: Tensor) -> HostRows:
        """Room for rows on their way to `out`; what has left is handed back before.

        All of them take no more than the rows of the entry do, and no more than the pool may
        hold: a host that is further ahead of the device waits.
        """
        while self._stages and self._stages[0][1].query():
            self._stages.popleft()[0].release()
        rows, width = out.shape
        size = out.numel() * out.element_size()
        while self._stages and sum(s.nbytes for s, _ in self._stages) + size > self._most:
            self._wait_for_oldest()
        while True:
            try:
                return HostRows(rows, width, out.dtype, self._pool or default_pool())
            except ValueError:
                # above the pool's limit
                if not self._stages:
                    raise
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        stage, event = self._stages.popleft()
        event.synchronize()
        stage.release()

    def release(self) -> None:
        """Unmap the files."""
        self._spans.clear()
        while self._stages:
            # the pool waits for what is under way
            self._stages.popleft()[0].release()


def new_part(
    entry: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    columns: tuple[int, int, int | None],
    identity: Identity,
) -> Part:
    """The index of rows that are about to be written."""
    start, end, global_size = columns
    name = f"{stem(entry, start, end)}.safetensors"
    return Part(entry, shape, CODES[dtype], start, end, global_size, identity, name)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
