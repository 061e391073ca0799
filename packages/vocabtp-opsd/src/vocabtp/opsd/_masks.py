"""Which rows of the student's logits a response mask counts.

The logits at position t predict token t + 1, so a mask `[B, T]` of response tokens counts the row
before each of them; packed rows `[rows, L]` are response rows already.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_mask(logits: Tensor, mask: Tensor | None, aligned: bool) -> Tensor | None:
    """Which rows of the logits count, or None for all of them."""
    if logits.ndim not in (2, 3):
        raise ValueError(f"student logits must be [rows, L] or [B, T, L], got {list(logits.shape)}")
    if mask is None:
        return None
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"response_mask marks tokens, so it must be bool or integer, got {mask.dtype}"
        )
    mask = (mask != 0).to(logits.device)
    if logits.ndim == 2:
        return _packed_mask(logits, mask)
    if mask.shape != logits.shape[:2]:
        raise ValueError(
            f"response_mask must be {list(logits.shape[:2])} for logits "
            f"{list(logits.shape)}, got {list(mask.shape)}"
        )
    if aligned:
        return mask
    if mask.shape[1] and bool(mask[:, 0].any()):
        raise ValueError(
            "response_mask marks the first token of a sequence, which no row of the "
            "logits scores; a mask of rows instead of tokens needs aligned=True"
        )
    return torch.nn.functional.pad(mask[:, 1:], (0, 1)) if mask.shape[1] else mask


def _packed_mask(logits: Tensor, mask: Tensor) -> Tensor | None:
    marked, rows = int(mask.sum()), logits.shape[0]
    if marked == rows:
        return None
    if mask.ndim == 1 and mask.shape[0] == rows:
        return mask
    raise ValueError(
        f"{rows} packed rows need a mask that marks {rows} tokens or a row mask "
        f"[{rows}], got a mask {list(mask.shape)} that marks {marked}"
    )
