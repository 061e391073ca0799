"""Triton where its compiler knows the device, eager PyTorch where it turns out that it does not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from vocabtp.kernels import _eager
from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._triton import jsd, kl, launch, merge, tokens

if TYPE_CHECKING:
    from vocabtp.kernels._backend import Implementation

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "token_stats": tokens.token_stats,
    "finish_tokens": tokens.finish_tokens,
    "token_grad": tokens.token_grad,
    "kl_stats": kl.kl_stats,
    "kl_terms": kl.kl_terms,
    "kl_grad": kl.kl_grad,
    "pair_stats": jsd.pair_stats,
    "jsd_terms": jsd.jsd_terms,
    "jsd_grad": jsd.jsd_grad,
    "merge_pair": merge.merge_pair,
    "finish_kl": merge.finish_kl,
    "finish_terms": merge.finish_terms,
}
_broken: set[str] = set()  # names of devices


class _UnlessBroken:
    """An implementation: each function is Triton's until one does not compile for the device.

    Both implementations share what they hand on, so that a call may begin with one and end with
    the other.
    """

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return functools.partial(_attempt, function)


def _attempt(function: str, first: Any, *args: Any, **options: Any) -> Any:
    # rows, statistics or a tensor
    where = first.sums.device if isinstance(first, ShardStats) else first.device
    if not broken(where):
        try:
            return _FUNCTIONS[function](first, *args, **options)
        except launch.CannotCompile as error:
            device = launch.name(where)
            if device not in _broken:
                _broken.add(device)
                warnings.warn(
                    f"vocabtp.kernels: Triton kernels do not work on {device}, so calls on it run "
                    f"in eager PyTorch from now on ({error})",
                    stacklevel=2,
                )
    return getattr(_eager, function)(first, *args, **options)


def broken(device: torch.device) -> bool:
    """Whether a kernel did not compile for it."""
    return bool(_broken) and launch.name(device) in _broken


UNLESS_BROKEN = cast("Implementation", _UnlessBroken())
