"""Where padding stands: on the left while answers grow, on the right when whole ones are scored.

A query row of attention that sees no key at all has no softmax. Padding on the left makes such
rows: the first columns precede every token. Fused kernels have answered them with NaN gradients
(seen on CUDA in bf16), which reach every weight. On the right there are none, because a column
always sees itself, in a sliding window too; and as causal attention never looks ahead, tokens need
no mask that hides the padding from them, so that kernels without a mask can be taken.
"""

from __future__ import annotations

import torch
from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """`[B, T]` positions that count tokens only, so that padding on the left shifts nothing."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def right_padded(tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's tokens to its start.

    Args:
        tokens: `[B, T]` ids.
        attention_mask: `[B, T]`, not 0 on tokens and 0 on padding, wherever it is.

    Returns:
        `[B, W]` ids, as wide as the longest row, at least 1; behind a row's tokens is what its
        padding held. And `[B, T]` the column that each token has there, -1 on padding.
    """
    real = attention_mask != 0
    columns = torch.where(real, real.cumsum(-1) - 1, -1)
    width = max(1, int(columns.max()) + 1) if columns.numel() else columns.shape[1]
    # stable: tokens first, in their order
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    return tokens.gather(1, order), columns
