"""What an op's call carries besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vocabtp.kernels._backend import Implementation
from vocabtp.kernels._exchange import Exchange
from vocabtp.kernels._ids import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Everything of a call that is no tensor."""

    name: str  # the public function, for messages
    implementation: Implementation
    exchange: Exchange
    temperature: float

    @staticmethod
    def dtype(*logits: Tensor) -> torch.dtype:
        """What the call computes in."""
        wide = any(x.dtype == torch.float64 for x in logits)
        return torch.float64 if wide else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec(Spec):
    """And of a call about tokens of one distribution."""

    ignore_index: int = -100
    vocab_start: int = 0
    vocab_size: int = 0
    at_once: bool = True  # report bad ids before returning

    @property
    def bounds(self) -> Bounds:
        """Which ids are which columns."""
        return Bounds(self.ignore_index, self.vocab_start, self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec(Spec):
    """And of a call about two distributions."""

    clip: float | None
    beta: float = 0.5
    scale: float = 1.0
