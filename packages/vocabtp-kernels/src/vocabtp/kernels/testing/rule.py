"""When an implementation is accurate enough."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_no_worse(
    actual: Tensor,
    eager: Tensor,
    truth: Tensor,
    *,
    slack: float = 2.0,
    floor: float | None = None,
    what: str = "value",
) -> None:
    """Demand that `actual` errs at most `slack` times as much as the eager path, plus a floor.

    Where the truth is NaN or infinite, `actual` must be the same: a rule about errors would let it
    pass.

    Args:
        actual: what is judged.
        eager: the eager implementation's result for the same input.
        truth: the fp64 reference.
        slack: the factor.
        floor: what is always allowed, absolute; None for fp32's eps times the largest truth.
        what: the name to use in messages.

    Raises:
        AssertionError: the shape, a non-finite element or the error is not right.
    """
    if actual.shape != truth.shape:
        raise AssertionError(f"{what}: shape {list(actual.shape)}, not {list(truth.shape)}")
    actual, eager, truth = (x.detach().double().cpu() for x in (actual, eager, truth))
    finite = truth.isfinite()
    wrong = torch.where(finite, ~actual.isfinite(), ~_same(actual, truth))
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        got, right = actual[tuple(at)].item(), truth[tuple(at)].item()
        raise AssertionError(f"{what}: {got} at {at}, not {right}")
    if not bool(finite.any()):
        return
    error = (actual - truth).abs()[finite].max().item()
    if floor is None:
        floor = torch.finfo(torch.float32).eps * truth.abs()[finite].max().item()
    allowed = slack * (eager - truth).abs()[finite].max().item() + floor
    if not error <= allowed:
        raise AssertionError(f"{what}: error {error:.3g}, allowed {allowed:.3g}")


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())
