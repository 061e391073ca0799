"""What the configuration's sections are made of: their base class and the types of their keys.

Values are taken as they are: no string becomes a number, no number becomes a boolean. The one
exception is a float key, which also takes a numeric string, because YAML 1.1 reads `1e-5` (no
dot) as a string. NaN and infinities are refused everywhere.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class RuleError(ValueError):
    """Two keys contradict each other; `key` is the one to look at first."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key} {text}")
        self.key = key
        self.text = text


def numeric_string(value: Any) -> Any:
    """A number for a text that writes one; anything else as it is."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


Float = Annotated[float, BeforeValidator(numeric_string)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of keys; frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
