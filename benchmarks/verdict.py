"""Whether an arm is right: values and gradients on a few rows of its inputs, against fp64.

The rows are spread over all of them, and what is judged is the call that is timed later, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cases import Case
from vocabtp.kernels import reference

# relative to the largest magnitude of the truth: what dense fp32 arithmetic reaches with room,
# for gradients after their rounding to the dtype of the logits
VALUES = 1e-4
GRADIENTS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
CHECKED_ROWS = 24
_ROWS_AT_ONCE = 256


class Truth(NamedTuple):
    """What an op has to return, fp64."""

    rows: Tensor  # the rows that are judged
    lead: torch.Size  # the shape of all rows
    values: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]  # of each side, for upstream gradients of 1
    means: tuple[float, ...]  # of the values over all rows; empty unless an arm asks


def find_truth(case: Case, inputs: Sequence[Tensor], means: bool) -> Truth:
    """The truth on some of the rows of an op's arguments."""
    lead = inputs[0].shape[:-1]
    total = lead.numel()
    device = inputs[0].device
    rows = torch.linspace(0, total - 1, min(total, CHECKED_ROWS), device=device).round().long()
    few = [take(x.detach(), rows, lead) for x in inputs]
    values = _values(case, few)
    index = few[case.sides] if case.ids else None
    ones = [torch.ones_like(value) for value in values]
    gradients = reference.gradients(
        case.truth, few[: case.sides], ones, index=index, **case.options
    )
    found: tuple[float, ...] = ()
    if means:
        sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in values]
        for start in range(0, total, _ROWS_AT_ONCE):
            part = [x.detach()[start : start + _ROWS_AT_ONCE] for x in inputs]
            sums = [s + value.sum() for s, value in zip(sums, _values(case, part), strict=True)]
        found = tuple(float(s) / total for s in sums)
    return Truth(rows, lead, values, gradients, found)


def take(x: Tensor, rows: Tensor, lead: torch.Size) -> Tensor:
    """Some rows of `[*lead, ...]`, counted in row-major order."""
    return x[torch.unravel_index(rows, lead)]


def _values(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    logits = [x.double() for x in inputs[: case.sides]]
    values = case.truth(*logits, *inputs[case.sides :], **case.options)
    return values if isinstance(values, tuple) else (values,)


def errors(
    truth: Truth, values: Sequence[Tensor], gradients: Sequence[Tensor], mean: bool
) -> tuple[float, float | None]:
    """Largest errors of values and gradients, relative to the largest magnitude of the truth."""
    rows = truth.rows
    if mean:
        right = torch.tensor(truth.means, dtype=torch.float64, device=rows.device)
        value = relative(torch.stack([v.detach().double() for v in values]), right)
    else:
        pairs = zip(values, truth.values, strict=True)
        value = worst([relative(take(v.detach(), rows, truth.lead), t) for v, t in pairs])
    if not gradients:
        return value, None
    scale = len(gradients[0]) if mean else 1
    pairs = zip(gradients, truth.gradients, strict=False)
    return value, worst([relative(scale * take(g, rows, truth.lead).double(), t) for g, t in pairs])


def relative(got: Tensor, truth: Tensor) -> float:
    """The largest error over the largest magnitude of the truth."""
    return float((got.double() - truth).abs().max() / truth.abs().max())


def worst(found: list[float]) -> float:
    """The largest of some errors; NaN if one is."""
    return max(found, key=lambda x: float("inf") if x != x else x)


def complaint(value: float, gradient: float | None, dtype: torch.dtype) -> str | None:
    """What is wrong with these errors, if anything."""
    if not value <= VALUES:
        return f"values are off by {value:.1e} of the largest, at most {VALUES:.0e}"
    if gradient is not None and not gradient <= GRADIENTS[dtype]:
        return f"gradients are off by {gradient:.1e} of the largest, at most {GRADIENTS[dtype]:.0e}"
    return None
