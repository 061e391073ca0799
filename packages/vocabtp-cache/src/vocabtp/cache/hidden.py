"""Payload `hidden`: what meets the teacher's head waits on the host, and meets it again.

    logits = softcap * tanh((hidden @ weight.T + bias) * scale / softcap)

A row takes H numbers instead of L: 9 to 170 times less for H from 8192 to 896 and half or all of
151,936 columns, for one more product with the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from vocabtp.cache._ahead import PREFETCH_BYTES
from vocabtp.cache._checks import check_budget, check_source, check_width
from vocabtp.cache._identity import Identity
from vocabtp.cache.pool import PinnedPool
from vocabtp.cache.teacher import TeacherCache
from vocabtp.dist import VocabShard


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherHead:
    """This rank's columns of a language model's head, and what the model does to their logits.

    The tensors are referred to, not copied: whoever changes or frees them changes what a cache
    that was given the head returns.

    Attributes:
        weight: `[L, H]`, on the device where the columns are wanted.
        bias: `[L]`; None for a head without one.
        scale: What the product, with the bias, is multiplied by.
        softcap: Logits are bent to stay within plus and minus this; None leaves them.

    Raises:
        TypeError: `weight` or `bias` is no plain floating tensor.
        ValueError: Their shapes, dtypes or devices do not fit, or `softcap` is not above 0.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "bias"):
            tensor = getattr(self, name)
            if tensor is None and name == "bias":
                continue
            if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local"):
                raise TypeError(
                    f"TeacherHead: {name} must be a plain tensor, got {type(tensor).__name__}"
                )
            if not tensor.dtype.is_floating_point:
                raise TypeError(f"TeacherHead: {name} must be floating, got {tensor.dtype}")
        weight, bias = self.weight, self.bias
        if weight.dim() != 2:
            raise ValueError(f"TeacherHead: weight must be [L, H], got {list(weight.shape)}")
        if bias is not None and (
            bias.shape != weight.shape[:1]
            or bias.dtype != weight.dtype
            or bias.device != weight.device
        ):
            raise ValueError(
                f"TeacherHead: bias must be [{weight.shape[0]}] {weight.dtype} on "
                f"{weight.device}, got {list(bias.shape)} {bias.dtype} on {bias.device}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"TeacherHead: softcap must be above 0, got {self.softcap}")

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits `[..., L]` of hidden states `[..., H]`, in the dtype of the weight."""
        weight, bias = self.weight.detach(), self.bias
        bias = None if bias is None else bias.detach()
        # the dtype is the weight's, not that of an autocast around the reader
        with torch.autocast(weight.device.type, enabled=False):
            logits = functional.linear(hidden.to(weight.dtype), weight, bias)
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class TeacherHiddenCache(TeacherCache):
    """A teacher's hidden states in front of its head; `fetch` applies the head to a chunk.

    Made by `store`. A row takes H numbers of the stored dtype. Every rank of a shard's group keeps
    the same rows, and applies its own columns of the head. The head runs on its own device and on
    the stream that calls `fetch`. With hidden states kept in the dtype that the model computes in
    nothing is rounded that the model does not round itself: columns differ from those of a
    `TeacherLogitCache` by the order in which a product of another number of rows is summed.
    """

    @classmethod
    def store(
        cls,
        hidden: Tensor,
        head: TeacherHead,
        shard: VocabShard | None = None,
        dtype: torch.dtype | None = None,
        *,
        teacher: str | None = None,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        pool: PinnedPool | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        donate: bool = False,
    ) -> Self:
        """Copy hidden states to host memory, as `TeacherLogitCache.store` copies logits.

        Args:
            hidden: `[N, H]` packed rows or `[B, T, H]`, of any strides, floating, on any device.
            head: The head that they meet; kept until the cache is freed.
            shard: The columns that the head has. `fetch` refuses another one.
            dtype: What the rows are kept as; None keeps their own.
            teacher: As for `TeacherLogitCache.store`.
            tokens: Likewise.
            positions: Likewise.
            pool: Likewise.
            prefetch_bytes: Likewise; of hidden states, the columns of a chunk are made by `fetch`.
            donate: Likewise.

        Returns:
            The filled cache, of shape `[N, L]` or `[B, T, L]` and of the dtype of the head.

        Raises:
            TypeError: As there, or `head` is no `TeacherHead`.
            ValueError: As there, or the head is of another width than `hidden`, or has other
                columns than the shard.
        """
        where = cls._where("store")
        if not isinstance(head, TeacherHead):
            raise TypeError(f"{where} head must be a TeacherHead, got {type(head).__name__}")
        kept = check_source(where, "hidden", hidden, dtype)
        width, wanted = hidden.shape[-1], head.weight.shape[1]
        if width != wanted:
            raise ValueError(
                f"{where} hidden must have the {wanted} numbers a row that the head's weight "
                f"{list(head.weight.shape)} takes, got {list(hidden.shape)}"
            )
        check_width(where, head.weight.T, shard)
        check_budget(where, prefetch_bytes)
        identity = Identity.of(where, teacher, tokens, positions)
        return cls._sent(
            hidden,
            _Hidden(head),
            (kept, head.weight.dtype),
            shard,
            identity,
            prefetch_bytes,
            columns=head.weight.shape[0],
            donated=donate,
            pool=pool,
        )


class _Hidden:
    """Hidden states, and the head that makes columns of them."""

    kind = "hidden"

    def __init__(self, head: TeacherHead) -> None:
        self._head: TeacherHead | None = head
        self.width = head.weight.shape[1]

    def place(self, device: torch.device) -> torch.device:
        """Where the head is."""
        assert self._head is not None
        return self._head.weight.device

    def columns(self, rows: Tensor) -> Tensor:
        """The head's."""
        assert self._head is not None
        return self._head(rows)

    def release(self) -> None:
        """Let go of the head, which may be all that keeps its weights on the device."""
        self._head = None
