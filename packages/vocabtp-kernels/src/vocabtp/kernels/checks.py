"""What a caller can get wrong in an op's arguments, said in one line.

Public for whoever calls the ops with an exchange: the same checks, before the first collective, so
that all ranks can agree on an error that one of them alone would raise. Each takes the public
function's name, for the message, and returns the checked value; a wrong type is a TypeError, a
wrong number, shape or device a ValueError.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

_LOGITS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LOWEST = 1e-37
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def number(caller: str, name: str, value: object) -> float:
    """A real number that is neither a bool nor a tensor."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{caller}: {name} must be a number, got {type(value).__name__}: "
            "give a Python float, equal on all ranks"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{caller}: {name} must be a number that a float can hold") from None


def integer(caller: str, name: str, value: object) -> int:
    """An integer of 64 bits that is neither a bool nor a tensor."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{caller}: {name} must be an integer, got {type(value).__name__}")
    result = int(value)
    if not -(2**63) <= result < 2**63:
        raise ValueError(f"{caller}: {name} must be an integer of 64 bits, got a larger one")
    return result


def flag(caller: str, name: str, value: object) -> bool:
    """A bool: a swapped argument must not choose a direction."""
    if not isinstance(value, bool):
        raise TypeError(f"{caller}: {name} must be True or False, got {type(value).__name__}")
    return value


def temperature(caller: str, value: object) -> float:
    """Finite and above 0."""
    result = number(caller, "temperature", value)
    if not 0.0 < result < math.inf:
        raise ValueError(f"{caller}: temperature must be finite and > 0, got {result}")
    # log2(e) / T and T have to be numbers of float32
    if not _LOWEST <= result <= 1.0 / _LOWEST:
        raise ValueError(
            f"{caller}: temperature must be between {_LOWEST} and {1.0 / _LOWEST}, got {result}"
        )
    return result


def clip(caller: str, value: object) -> float | None:
    """None or finite and above 0."""
    if value is None:
        return None
    result = number(caller, "pointwise_clip", value)
    if not 0.0 < result < math.inf:
        raise ValueError(
            f"{caller}: pointwise_clip must be finite and > 0, got {result}; None caps nothing"
        )
    # above the largest number of float32 nothing is capped, nor can it be compared with
    return min(result, torch.finfo(torch.float32).max)


def beta(caller: str, value: object) -> float:
    """In [0, 1]; NaN is not."""
    result = number(caller, "beta", value)
    if not 0.0 <= result <= 1.0:
        raise ValueError(f"{caller}: beta must be in [0, 1], got {result}")
    return result


def logits(caller: str, name: str, value: object) -> Tensor:
    """A floating-point tensor with a vocabulary dimension, and numbers."""
    return _numbers(caller, name, _logits(caller, name, value))


def _numbers(caller: str, name: str, value: Tensor) -> Tensor:
    if value.device.type == "meta":
        raise TypeError(f"{caller}: {name} must have numbers, got a tensor on the meta device")
    return value


def _plain(caller: str, name: str, value: object) -> Tensor:
    """A tensor whose memory is here, as a kernel reads it; a DTensor's is not."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be a tensor, got {type(value).__name__}")
    if hasattr(value, "to_local"):
        raise TypeError(
            f"{caller}: {name} must be a plain tensor, got {type(value).__name__}; "
            "the ops of vocabtp.dist take one"
        )
    return value


def _logits(caller: str, name: str, given: object) -> Tensor:
    value = _plain(caller, name, given)
    if value.dtype not in _LOGITS:
        raise TypeError(
            f"{caller}: {name} must be bfloat16, float16, float32 or float64, got {value.dtype}"
        )
    if value.is_nested:  # it has no shape to ask for
        raise TypeError(f"{caller}: {name} must be a dense tensor, got a nested one")
    if value.layout != torch.strided:
        raise TypeError(f"{caller}: {name} must be a dense tensor, got {value.layout}")
    if value.dim() == 0:
        raise ValueError(
            f"{caller}: {name} must be [..., vocabulary], got a tensor of no dimension"
        )
    return value


def pair(caller: str, student: object, teacher: object) -> tuple[Tensor, Tensor]:
    """Two logits tensors over the same rows, columns and device; dtypes may differ."""
    one = _logits(caller, "student_logits", student)
    two = _logits(caller, "teacher_logits", teacher)
    if one.shape != two.shape:
        raise ValueError(
            f"{caller}: student and teacher must share a shape, "
            f"got {list(one.shape)} and {list(two.shape)}"
        )
    if one.device != two.device:
        raise ValueError(
            f"{caller}: student and teacher must be on one device, "
            f"got {one.device} and {two.device}"
        )
    return _numbers(caller, "student_logits", one), two


def index(caller: str, given: object, of: Tensor) -> Tensor:
    """Integer ids `[...]` or `[..., K]` for logits `[..., L]`, on their device; as `[..., K]`."""
    value = _plain(caller, "index", given)
    if value.dtype not in _IDS:
        raise TypeError(f"{caller}: index must hold integers, got {value.dtype}")
    lead = of.shape[:-1]
    if value.shape != lead and value.shape[:-1] != lead:
        raise ValueError(
            f"{caller}: index must be {list(lead)} or that and [K], for logits {list(of.shape)}, "
            f"got {list(value.shape)}"
        )
    if value.device != of.device:
        raise ValueError(
            f"{caller}: index must be where the logits are, got {value.device} and {of.device}"
        )
    value = value.resolve_neg()
    return value.unsqueeze(-1) if value.shape == lead else value
