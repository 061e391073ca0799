"""Working copies of a few rows at a time, and sums whose order depends on the width alone.

torch's own reductions change their order with the shape and the number of threads, so that a row
would get other bits in other company. Here a sum is a tree of element-wise additions, halving the
width each time: the same bits alone, in a batch, with any number of threads and on any device, and
an error that grows with log2 of the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vocabtp.kernels._rows import Rows
from vocabtp.kernels._stats import INF

# what all temporaries of one step may take together, of the promised 64 MiB; an accelerator's
# time goes with the number of steps. On the CPU less, so that a step stays in the cache
_BUDGET = 56 << 20
_BUDGET_CPU = 8 << 20
# the width from which a sum goes on with rows side by side
_TAIL = 64
# ids that each id of a row is compared with at a time
ALIKE = 128


def chunks(rows: Rows, dtype: torch.dtype, buffers: float, ids: int = 0) -> Iterator[slice]:
    """Row chunks such that `buffers` working copies stay within the budget.

    A mask counts as a working copy of its own size: a quarter of one in fp32. So do six 8-byte
    numbers of each of so many ids of a row, and its comparison with others.
    """
    step = _step(rows, dtype, buffers, ids)
    for start in range(0, rows.num_rows, step):
        yield slice(start, min(start + step, rows.num_rows))


def working(
    rows: Rows, dtype: torch.dtype, planes: int, more: float, ids: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Row chunks and the same `[planes, n, L]` for each, with room for `more` copies beside it."""
    space = None
    # and what `row_sum` of all planes copies
    more += planes * min(0.5, _TAIL / max(1, rows.num_cols))
    for here in chunks(rows, dtype, planes + more, ids):
        shape = (planes, here.stop - here.start, rows.num_cols)
        if space is None:
            space = torch.empty(shape, dtype=dtype, device=rows.device)
        yield here, space.flatten()[: math.prod(shape)].view(shape)


def _step(rows: Rows, dtype: torch.dtype, buffers: float, ids: int) -> int:
    budget = _BUDGET_CPU if rows.device.type == "cpu" else _BUDGET
    alike = min(ids, ALIKE) if ids > 1 else 0
    row_bytes = rows.num_cols * dtype.itemsize * buffers + ids * (8 * 6 + alike * 12)
    return max(1, int(budget / max(1, row_bytes)))


def row_max(x: Tensor) -> Tensor:
    """The maximum of each row of `[..., L]`: NaN if there is one, -inf without columns."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -INF)
    return x.amax(-1)


def row_sum(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[..., L]`, contiguous, which is overwritten.

    All sums of a step are best taken at once: they are as many additions as those of one.
    """
    shape, full = x.shape[:-1], x.shape[-1]
    if full == 0:
        return x.new_zeros(shape)
    x = x.view(-1, full)
    width = full
    while width > 1:
        # not `+=`, which would also assign the result to the slice
        half = (width + 1) // 2
        x[:, : width - half].add_(x[:, half:width])
        width = half
        if width <= _TAIL < full:
            # short rows side by side: the same additions over long columns
            return _column_sum(x[:, :width].t().contiguous()).view(shape)
    return x[:, 0].clone().view(shape)


def _column_sum(x: Tensor) -> Tensor:
    width = x.shape[0]
    while width > 1:
        half = (width + 1) // 2
        x[: width - half].add_(x[half:width])
        width = half
    return x[0].clone()


def centre_(x: Tensor, maxes: Tensor, temperature: float) -> Tensor:
    """`(x - max) / T` of rows `[..., L]` in place; one without support stays -inf."""
    x -= maxes.masked_fill(maxes == -INF, 0.0)[..., None]
    if temperature != 1.0:
        x /= temperature
    return x
