"""Where a number that is not finite came from: a response token, by the first row of the loss.

Ranks tell each other where as numbers, with what they exchange at the end of a step anyway; then
all of them can say it in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A response token of a step: all -1 is none."""

    prompt: int = -1  # index of the prompt
    sample: int = -1  # which of the answers to it
    token: int = -1  # of the answer

    @classmethod
    def of_ranks(cls, numbers: Tensor) -> Self:
        """The first place that any rank saw, of `[world, 3]` numbers in rank order."""
        for row in numbers.tolist():
            if row[0] >= 0:
                return cls(*(int(n) for n in row))
        return cls()

    def numbers(self) -> list[float]:
        """What `of_ranks` reads."""
        return [float(self.prompt), float(self.sample), float(self.token)]

    def __bool__(self) -> bool:
        return self.prompt >= 0


def first_bad_row(chunks: Sequence[Tensor], lengths: Sequence[int]) -> tuple[int, int] | None:
    """The first row whose metrics are not all finite.

    Args:
        chunks: `[M, n]` metrics of consecutive packed rows.
        lengths: Rows of each sequence.

    Returns:
        Sequence and row in it, both from 0; None where every metric is finite.
    """
    if not chunks:
        return None
    bad = (~torch.cat(list(chunks), dim=1).isfinite()).any(dim=0).nonzero()
    if not len(bad):
        return None
    row = int(bad[0])
    for sequence, length in enumerate(lengths):
        if row < length:
            return sequence, row
        row -= length
    return None
