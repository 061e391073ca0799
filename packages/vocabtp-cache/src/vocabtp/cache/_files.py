"""One file of rows in the safetensors format, written once and mapped into memory.

The header is a function of dtype and shape alone. A reader therefore knows every byte that must
stand in front of the rows, and a file with another header is refused without parsing it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from vocabtp.cache._identity import raw

CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
DTYPE_OF = {code: dtype for dtype, code in CODES.items()}
# rows start at a multiple of this
_ALIGNMENT = 64
_READ_BYTES = 8 << 20


def header(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What stands in front of the rows."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    about = {
        "__metadata__": {"format": "vocabtp.cache 1"},
        "rows": {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [0, size]},
    }
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is complete and on the disk, and not before."""
    name = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names of a folder on the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_rows(
    path: Path, shape: tuple[int, ...], dtype: torch.dtype, pieces: Iterator[Tensor]
) -> tuple[int, str]:
    """Write contiguous pieces in row order.

    Returns:
        The size of the file and its SHA-256.
    """
    start = header(shape, dtype)
    digest = hashlib.sha256(start)
    size = len(start)
    with replacing(path) as file:
        file.write(start)
        for piece in pieces:
            view = raw(piece)
            file.write(view)
            digest.update(view)
            size += len(view)
    return size, digest.hexdigest()


def check_size(path: Path, size: int) -> None:
    """Refuse a file that is missing or has another size, by its name."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, though an index names it") from None
    if found != size:
        raise ValueError(f"{path} was truncated or altered: it has {found} bytes, not {size}")


def map_rows(
    path: Path, shape: tuple[int, ...], dtype: torch.dtype, size: int, sha256: str | None
) -> Tensor:
    """The rows of a file, mapped.

    Args:
        path: The file.
        shape: Of the rows.
        dtype: Of the rows.
        size: Bytes of the file.
        sha256: What the whole file must hash to; None does not read it.

    Returns:
        A tensor of `shape` that reads the file when it is read.

    Raises:
        ValueError: The file is missing, or is not the one described; names it.
    """
    expected = header(shape, dtype)
    check_size(path, size)
    with open(path, "rb") as file:
        # private pages: nothing that is written to the tensor reaches the file
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    if mapped[: len(expected)] != expected:
        raise ValueError(f"{path} was altered: its header is not that of {CODES[dtype]} {shape}")
    if sha256 is not None and _sha256(mapped) != sha256:
        raise ValueError(f"{path} was altered: its SHA-256 is not the one that its index names")
    count = (size - len(expected)) // dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=len(expected)).view(shape)


def _sha256(mapped: mmap.mmap) -> str:
    digest = hashlib.sha256()
    with memoryview(mapped) as view:
        for at in range(0, len(view), _READ_BYTES):
            digest.update(view[at : at + _READ_BYTES])
    return digest.hexdigest()
