"""What of the teacher waits on the host, and how the columns of the shard come from it.

A kind of payload is a width of host rows and a function from rows to columns; everything else -
memory, streams, prefetch, lifetime, identity - is the same for all kinds.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Payload(Protocol):
    """One kind.

    Attributes:
        kind: Its name, as configurations write it.
        width: Numbers in a row on the host.
    """

    @property
    def kind(self) -> str: ...

    @property
    def width(self) -> int: ...

    def place(self, device: torch.device) -> torch.device:
        """Where the rows have to be for `columns`, if the result is wanted on `device`."""

    def columns(self, rows: Tensor) -> Tensor:
        """`[..., L]` of `[..., width]`; may be `rows` itself, or use its memory."""

    def release(self) -> None:
        """The cache was freed: keep nothing but `kind` and `width`."""


class Logits:
    """The columns themselves."""

    kind = "logits"

    def __init__(self, width: int) -> None:
        self.width = width

    def place(self, device: torch.device) -> torch.device:
        """Anywhere."""
        return device

    def columns(self, rows: Tensor) -> Tensor:
        """The rows."""
        return rows

    def release(self) -> None:
        """Nothing is kept."""
