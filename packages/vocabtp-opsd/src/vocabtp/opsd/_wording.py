"""What is wrong with one value of the configuration, in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_RANGES = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must have {min_length} entries",
    "too_long": "must have {max_length} entries",
}
_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "model_type": "must be a section with keys",
    "dict_type": "must be a section with keys",
}


def shown(value: Any) -> str:
    """A value as YAML writes it, cut to a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def value_problem(key: str, item: Mapping[str, Any]) -> str:
    """The rule that a value breaks and the value itself, as the end of a line that names the key.

    Args:
        key: The full name of the key.
        item: One entry of pydantic's `ValidationError.errors()`.
    """
    kind, value, ctx = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        inside = len(item["loc"]) > 2
        return "has too few entries" if inside else "is missing; it has no default"
    if kind == "literal_error":
        allowed = [part.strip("' ") for part in ctx["expected"].replace(" or ", ",").split(",")]
        close = difflib.get_close_matches(str(value), allowed, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        choice = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
        return f"must be {choice}; got {shown(value)}{hint}"
    if kind in _RANGES:
        return f"{_RANGES[kind].format(**ctx)}, got {shown(value)}"
    if kind in _TYPES:
        quoted = isinstance(value, str) and kind != "string_type"
        hint = " (a string; leave out the quotes)" if quoted and _unquoted(value, kind) else ""
        return f"{_TYPES[kind]}, got {shown(value)}{hint}"
    return f"{item['msg']}, got {shown(value)}"


def _unquoted(value: str, kind: str) -> bool:
    if kind == "bool_type":
        return value.lower() in ("true", "false", "yes", "no", "on", "off")
    return value.lstrip("+-").replace(".", "", 1).isdigit()
