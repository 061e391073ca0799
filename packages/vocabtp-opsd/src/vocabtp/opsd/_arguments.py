"""What kinds of arguments the loss takes, said before the ranks compare notes."""

from __future__ import annotations

from torch import Tensor

from vocabtp.cache import TeacherCache
from vocabtp.dist import VocabShard


def check_types(
    student: object, teacher: object, mask: object, shard: object, normalizer: object
) -> None:
    """Refuse what is not of the kinds that the arguments have."""
    wanted: dict[str, tuple[object, type | tuple[type, ...]]] = {
        "student_logits": (student, Tensor),
        "teacher": (teacher, (Tensor, TeacherCache)),
        "response_mask": (mask, (Tensor, type(None))),
        "shard": (shard, (VocabShard, type(None))),
        "normalizer": (normalizer, (Tensor, int, float, type(None))),
    }
    for name, (value, kinds) in wanted.items():
        if not isinstance(value, kinds):
            some = kinds if isinstance(kinds, tuple) else (kinds,)
            names = " or ".join(k.__name__.replace("NoneType", "None") for k in some)
            raise TypeError(f"{name} must be {names}, got {type(value).__name__}")
    for name, value in (("student_logits", student), ("teacher", teacher)):
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise TypeError(f"{name} must be floating-point logits, got {value.dtype}")
    if isinstance(normalizer, int | float) and not 0 < normalizer < float("inf"):
        raise ValueError(f"normalizer must be a finite number > 0, got {normalizer}")
