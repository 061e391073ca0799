"""What a cache was filled from, in a form that can be kept and compared."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Identity:
    """Where the rows of a cache come from, as far as `TeacherLogitCache.store` was told.

    Attributes:
        teacher: The name of the model, as the caller writes it.
        tokens: SHA-256 of the token ids that the teacher read.
        positions: SHA-256 of the positions that the rows belong to.
    """

    teacher: str | None = None
    tokens: str | None = None
    positions: str | None = None

    @classmethod
    def of(
        cls, where: str, teacher: str | None, tokens: Tensor | None, positions: Tensor | None
    ) -> Identity:
        """The identity of these; `where` starts the message of an error."""
        if teacher is not None and not isinstance(teacher, str):
            raise TypeError(f"{where} teacher must be a string, got {type(teacher).__name__}")
        return cls(
            teacher,
            _digest(f"{where} tokens", tokens),
            _digest(f"{where} positions", positions),
        )

    def mismatch(self, expected: Identity) -> str | None:
        """What `expected` names and this is not, in words; None where they agree."""
        for name, wanted in asdict(expected).items():
            kept = getattr(self, name)
            if wanted is not None and wanted != kept:
                return (
                    f"{name} must be the cache's own, {kept or 'which it was not told'}, got "
                    f"{wanted}"
                )
        return None


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive them."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _digest(what: str, ids: Tensor | None) -> str | None:
    """SHA-256 of shape and numbers, the same whatever the integer type and the device."""
    if ids is None:
        return None
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{what} must be integers or bools, got {ids.dtype}")
    numbers = ids.detach().to("cpu", torch.int64).contiguous()
    digest = hashlib.sha256(str(list(ids.shape)).encode())
    digest.update(raw(numbers))
    return digest.hexdigest()
