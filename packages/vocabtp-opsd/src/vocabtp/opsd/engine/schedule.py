"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak`, then constant, or down to 0 linearly or by half a cosine."""

    kind: Literal["cosine", "linear", "constant"]
    peak: float
    warmup: int  # steps; step `warmup - 1` is the first at the peak
    total: int  # steps of the whole run

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0.

        The first step of a warm-up already moves (peak / warmup), and so does the last one of
        the run: 0 would be reached one step after it.
        """
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "linear":
            return self.peak * (1.0 - done)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))
