"""Which tokens of a row may be drawn: the options of sampling and their ranges."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels import checks


class Filters(NamedTuple):
    """Which tokens may be drawn; None is off."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None


def check_options(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, vocab: int
) -> Filters:
    """The filters that are on; a value out of its range is a ValueError."""
    name = "vocab_parallel_sample"
    for option, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            checks.number(name, option, value)
    if not 0 < checks.number(name, "temperature", temperature) < math.inf:
        raise ValueError(
            f"{name}: temperature must be a finite number > 0, got {temperature!r}; "
            "use vocab_parallel_argmax for greedy choice"
        )
    if top_k is not None and (top_k < 1 or top_k % 1 != 0):
        raise ValueError(f"{name}: top_k must be an int >= 1 or None (off), got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"{name}: top_p must be in (0, 1] or None (off), got {top_p!r}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"{name}: min_p must be in [0, 1] or None (off), got {min_p!r}")
    return Filters(
        temperature=float(temperature),
        top_k=None if top_k is None or top_k >= vocab else int(top_k),
        top_p=None if top_p is None or top_p == 1 else float(top_p),
        min_p=min_p or None,
    )


def check_keys(keys: Tensor, logits: Tensor) -> None:
    """Refuse keys that are not one int64 a row where the logits are."""
    name = "vocab_parallel_sample"
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64:
        got = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise TypeError(f"{name}: keys must be an int64 tensor, got {got}")
    if keys.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name}: keys must have one entry a row, {list(logits.shape[:-1])}, "
            f"got {list(keys.shape)}"
        )
    if keys.device != logits.device:
        raise ValueError(f"{name}: keys are on {keys.device}, logits on {logits.device}")
