"""What the trainer asks of an engine, whatever library it stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What every rank knows after a step; the same on all of them."""

    applied: bool  # False: no weight moved
    reason: str  # why not; empty when applied
    grad_norm: float  # before clipping; NaN when the step had no gradient at all
    learning_rate: float  # of this step
    reports: Tensor  # [dp, F] fp64: what each data-parallel rank reported, in rank order
    ranks: Tensor  # [world, G] fp64: what each rank reported for itself


class Engine(Protocol):
    """Accumulates gradients and steps.

    A loss handed to `backward` is already divided by the tokens of the whole optimizer step: an
    engine adds gradients up, over micro-batches and data-parallel ranks, and averages nothing.
    """

    @property
    def slots(self) -> Sequence[object]:
        """One entry for each parameter that is trained."""

    @property
    def lockstep(self) -> bool:
        """Whether data-parallel ranks have to call `backward` equally often in a step."""

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add this micro-batch's gradient.

        Out of lockstep a rank may call it any number of times in a step, also never. In lockstep
        all ranks call it equally often, and say in the step's last call that it is that.
        """

    def step(
        self, index: int, *, tokens: int, report: Sequence[float], own: Sequence[float]
    ) -> StepResult:
        """Apply optimizer step `index` (from 0), or skip it on all ranks alike."""

    def zero_grad(self) -> None:
        """Drop what was accumulated since the last step."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs beside the model, by qualified parameter name."""

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave."""

    def empty_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors to read the saved entries `names` into, placed as this engine holds them."""
