"""What caches take, and what they say about the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabtp.dist import VocabShard

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def columns(shard: VocabShard | None) -> str:
    """A shard in words, for a message."""
    if shard is None:
        return "no shard"
    return f"columns [{shard.start}, {shard.end}) of {shard.global_size}"


def check_source(where: str, name: str, source: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Refuse what a cache cannot keep; what it is kept as, its own dtype for None."""
    if not isinstance(source, Tensor):
        raise TypeError(f"{where} {name} must be a tensor, got {type(source).__name__}")
    if hasattr(source, "to_local"):
        raise TypeError(
            f"{where} {name} must be a plain tensor, got {type(source).__name__}; "
            f"pass {name}.to_local() and its shard"
        )
    if not source.dtype.is_floating_point:
        raise TypeError(f"{where} {name} must be floating, got {source.dtype}")
    kept = source.dtype if dtype is None else dtype
    if kept not in DTYPES:
        raise TypeError(f"{where} dtype must be bfloat16, float16, float32 or float64, got {kept}")
    if source.dim() not in (2, 3):
        letter = "L" if name == "logits" else "H"
        raise ValueError(
            f"{where} {name} must be [rows, {letter}] or [B, T, {letter}], got {list(source.shape)}"
        )
    return kept


def check_width(where: str, logits: Tensor, shard: VocabShard | None) -> None:
    """Refuse columns that are not those of the shard; the last dimension of `logits` is theirs."""
    if shard is None:
        return
    if not isinstance(shard, VocabShard):
        raise TypeError(f"{where} shard must be a VocabShard, got {type(shard).__name__}")
    if shard.width != logits.shape[-1]:
        raise ValueError(
            f"{where} the last dimension must be the shard's width, {shard.width} for "
            f"{columns(shard)}, got {list(logits.shape)}; pass this rank's columns only"
        )


def _check_int(where: str, name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where} {name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{where} {name} must be at least {least}, got {value}")


def check_budget(where: str, nbytes: int) -> None:
    """Refuse what is no number of bytes for prefetched chunks."""
    _check_int(where, "prefetch_bytes", nbytes, 0)


def check_chunk(where: str, chunk: int) -> None:
    """Refuse what is no size of a chunk."""
    _check_int(where, "chunk", chunk, 1)


def check_range(where: str, start: int, end: int, length: int) -> None:
    """Refuse a range that is not inside `[0, length)`."""
    for name, value in (("start", start), ("end", end)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{where} {name} must be an int, got {type(value).__name__} {value!r}")
    if not 0 <= start <= end <= length:
        raise ValueError(
            f"{where} the range must satisfy 0 <= start <= end <= {length}, "
            f"got start={start}, end={end}"
        )


def check_entry(where: str, entry: int) -> None:
    """Refuse what is no number of a saved cache."""
    _check_int(where, "entry", entry, 0)
