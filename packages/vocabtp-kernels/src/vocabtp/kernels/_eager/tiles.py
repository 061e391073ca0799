"""Working copies of a few rows at a time, and sums whose order depends on the width alone.

torch's own reductions change their order with the shape and the number of threads, so that a row
would get other bits in other company. Here a sum is a tree of element-wise additions, halving the
width each time: the same bits alone, in a batch, with any number of threads and on any device, and
an error that grows with log2 of the width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF

# what all temporaries of one step may take together. Half of the promised 64 MiB, since an
# operator holds a temporary or two of its own; on the CPU less, so that a step stays in the cache
_BUDGET = 32 << 20
_BUDGET_CPU = 8 << 20
# ids that each id of a row is compared with at a time
ALIKE = 128


def chunks(rows: Rows, dtype: torch.dtype, buffers: int, ids: int = 0) -> Iterator[tuple[int, int]]:
    """Bounds of row chunks such that `buffers` working copies stay within the budget.

    So do six 8-byte numbers of each of so many ids of a row, and its comparison with others.
    """
    budget = _BUDGET_CPU if rows.device.type == "cpu" else _BUDGET
    alike = min(ids, ALIKE) if ids > 1 else 0
    row_bytes = max(1, rows.num_cols * dtype.itemsize * buffers + ids * (8 * 6 + alike * 12))
    step = max(1, budget // row_bytes)
    for start in range(0, rows.num_rows, step):
        yield start, min(start + step, rows.num_rows)


def row_max(x: Tensor) -> Tensor:
    """The maximum of each row of `[n, L]`: NaN if there is one, -inf without columns."""
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), -INF)
    return x.amax(1)


def row_sum(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[n, L]`, which is overwritten."""
    width = x.shape[1]
    if width == 0:
        return x.new_zeros(x.shape[0])
    while width > 1:
        half = (width + 1) // 2
        x[:, : width - half] += x[:, half:width]
        width = half
        if width <= 64 < x.shape[1]:
            # short rows side by side: the same additions over long columns
            return _column_sum(x[:, :width].t().contiguous())
    return x[:, 0].clone()


def _column_sum(x: Tensor) -> Tensor:
    width = x.shape[0]
    while width > 1:
        half = (width + 1) // 2
        x[: width - half] += x[half:width]
        width = half
    return x[0].clone()


def centre_(x: Tensor, maxes: Tensor, temperature: float) -> Tensor:
    """`(x - max) / T` in place; a row without support stays -inf."""
    x -= maxes.masked_fill(maxes == -INF, 0.0)[:, None]
    if temperature != 1.0:
        x /= temperature
    return x
