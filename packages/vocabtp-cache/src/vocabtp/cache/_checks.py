"""What `TeacherLogitCache.store` takes, and what it says about the rest."""

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


def check_source(logits: Tensor, shard: VocabShard | None, dtype: torch.dtype) -> None:
    """Refuse what `TeacherLogitCache.store` cannot keep."""
    where = "TeacherLogitCache.store:"
    if not isinstance(logits, Tensor):
        raise TypeError(f"{where} logits must be a tensor, got {type(logits).__name__}")
    if hasattr(logits, "to_local"):
        raise TypeError(
            f"{where} logits must be a plain tensor, got {type(logits).__name__}; "
            "pass logits.to_local() and its shard"
        )
    if not logits.dtype.is_floating_point:
        raise TypeError(f"{where} logits must be floating, got {logits.dtype}")
    if dtype not in DTYPES:
        raise TypeError(f"{where} dtype must be bfloat16, float16, float32 or float64, got {dtype}")
    if logits.dim() not in (2, 3):
        raise ValueError(f"{where} logits must be [rows, L] or [B, T, L], got {list(logits.shape)}")
    if shard is None:
        return
    if not isinstance(shard, VocabShard):
        raise TypeError(f"{where} shard must be a VocabShard, got {type(shard).__name__}")
    if shard.width != logits.shape[-1]:
        raise ValueError(
            f"{where} the last dimension must be the shard's width, {shard.width} for "
            f"{columns(shard)}, got {list(logits.shape)}; pass this rank's columns only"
        )


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
    if not isinstance(entry, int) or isinstance(entry, bool):
        raise TypeError(f"{where} entry must be an int, got {type(entry).__name__} {entry!r}")
    if entry < 0:
        raise ValueError(f"{where} entry must be at least 0, got {entry}")
