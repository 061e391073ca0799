"""Names of configuration keys: the full list, the reference, and the nearest to a wrong one."""

from __future__ import annotations

import difflib
import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types as at
from pydantic.fields import FieldInfo

from vocabtp.opsd._fields import Section
from vocabtp.opsd._schema import Sections


class KeyReference(NamedTuple):
    """One key of the configuration, as the documentation lists it."""

    section: str  # "" for a key outside the sections
    key: str
    type: str
    default: str  # "required" where there is none
    description: str
    allowed: str  # range or choice; "" where the type says it all


def sections() -> dict[str, type[Section]]:
    """The sections by name, in the order of the configuration file."""
    return {
        name: field.annotation
        for name, field in Sections.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def all_keys() -> list[str]:
    """Every key by its full name."""
    return [f"{row.section}.{row.key}".lstrip(".") for row in reference()]


def reference() -> list[KeyReference]:
    """Every key with type, default, description and allowed values, in file order."""
    rows = []
    known = sections()
    for name, field in Sections.model_fields.items():
        if name in known:
            rows += [_row(name, key, f) for key, f in known[name].model_fields.items()]
        else:
            rows.append(_row("", name, field))
    return rows


def nearest(key: str) -> str:
    """What to say about an unknown key: where it belongs, or the name it resembles.

    Args:
        key: The full name, such as `data.learning_rate`.

    Returns:
        The end of a sentence that starts with "unknown key ...".
    """
    section, _, name = key.rpartition(".")
    known = all_keys()
    wanted = name.lower().replace("-", "_")
    homes = [k for k in known if k.rpartition(".")[2] == wanted]
    same = [k for k in homes if k.rpartition(".")[0] == section]
    if homes and not same:
        return f"use {' or '.join(homes)}, not {key}"
    if same:
        return f"did you mean {same[0]}?"
    if not section and (close := difflib.get_close_matches(wanted, list(sections()), 1)):
        return f"did you mean {close[0]}?"
    if section and section not in sections():
        close = difflib.get_close_matches(f"{section}.{wanted}", known, 1)
        return f"did you mean {close[0]}?" if close else _sections_text()
    mates = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(wanted, mates, 1):
        return f"did you mean {section}.{close[0]}?".replace(" .", " ")
    names = {k.rpartition(".")[2]: k for k in known}
    if close := difflib.get_close_matches(wanted, list(names), 1):
        return f"did you mean {names[close[0]]}?"
    return f"{section} has {', '.join(mates)}" if section else _sections_text()


def _sections_text() -> str:
    return f"the sections are {', '.join(sections())}"


def _row(section: str, key: str, field: FieldInfo) -> KeyReference:
    bounds = [*field.metadata, *_metadata(field.annotation)]
    default = "required" if field.is_required() else _plain(field.default)
    text = (field.description or "").strip()
    return KeyReference(
        section, key, _type_name(field.annotation), default, text, _allowed(field, bounds)
    )


def _plain(value: Any) -> str:
    """A value as YAML shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _metadata(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return [*extra, *_metadata(inner)]
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return [m for arg in get_args(annotation) for m in _metadata(arg)]
    if isinstance(annotation, FieldInfo):
        return list(annotation.metadata)
    return []


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(a) for a in get_args(annotation))
    return tuple(c for arg in get_args(annotation) for c in _choices(arg))


def _type_name(annotation: Any) -> str:
    names = {int: "int", float: "float", str: "string", bool: "bool", type(None): "null"}
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return "string"
    if origin is tuple:
        return f"[{', '.join(_type_name(a) for a in get_args(annotation))}]"
    if origin is dict:
        return "file or mapping"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(a) for a in get_args(annotation))
    return names[annotation]


def _allowed(field: FieldInfo, bounds: list[Any]) -> str:
    if choices := _choices(field.annotation):
        return ", ".join(choices)
    found: list[str] = []
    for bound in bounds:
        items = bound.metadata if isinstance(bound, FieldInfo) else [bound]
        for item in items:
            text = _bound(item)
            if text and text not in found:
                found.append(text)
    return ", ".join(found)


def _bound(item: Any) -> str:
    for kind, sign, name in (
        (at.Gt, ">", "gt"),
        (at.Ge, ">=", "ge"),
        (at.Lt, "<", "lt"),
        (at.Le, "<=", "le"),
    ):
        if isinstance(item, kind):
            return f"{sign} {getattr(item, name)}"
    return "not empty" if isinstance(item, at.MinLen) else ""
