"""What ranks tell each other at the end of a step, and what they make of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vocabtp.opsd.parallel import Layout

BAD_NORM = "the gradient norm is not finite"


def gather(layout: Layout, numbers: Sequence[float]) -> Tensor:
    """`[world, n]` on the host: the numbers of each rank, on all of them."""
    mine = torch.tensor(list(numbers), dtype=torch.float64, device=layout.device)
    if layout.world == 1:
        return mine[None].cpu()
    parts = [torch.empty_like(mine) for _ in range(layout.world)]
    dist.all_gather(parts, mine, group=layout.world_group)
    return torch.stack(parts).cpu()


def refusal(tokens: int, norm: float, losses: Tensor) -> str:
    """Why a step is not taken, from what all ranks know; empty if it is."""
    if not tokens:
        return "no response token in the step"
    if not bool(torch.isfinite(losses).all()):
        return "the loss is not finite"
    if not math.isfinite(norm):
        return BAD_NORM
    return ""


def first_bad(layout: Layout, names: Sequence[str], bad: Sequence[int]) -> str:
    """Which parameter's gradient is the first that is not finite on any rank, as a clause.

    One more exchange, on all ranks, in a step that is skipped.

    Args:
        layout: The ranks.
        names: Of the parameters.
        bad: Indices into them, ascending: what this rank found.
    """
    found = gather(layout, [bad[0] if bad else len(names)]).flatten().tolist()
    first = int(min(found))
    if first == len(names):
        return ""
    rank = f" on rank {found.index(first)}" if len(found) > 1 else ""
    return f": first in the gradient of {names[first]}{rank}"
