"""Write docs/configuration.md from the configuration's model.

    python docs/scripts/configuration.py

A test compares the page with what this prints; run it after every change of a key.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from vocabtp.opsd._keys import sections
from vocabtp.opsd.config import KeyReference, reference

PAGE = Path(__file__).parents[1] / "configuration.md"

HEAD = """\
<!-- Written by docs/scripts/configuration.py; change the model, not this page. -->

# Configuration

One YAML or JSON file with the sections below. Only `student.model_name_or_path`,
`teacher.model_name_or_path` and `data.path` are required. Unknown keys are errors that name the
nearest valid one. Values are not converted: a string is no number and a number no boolean; the one
exception is a number written like `1e-5`, which YAML reads as a string. NaN and infinities are
refused.

Paths of models and data are looked for beside the file first, then in the working directory; those
given as an override on the [command line](cli.md) the other way round.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, rows in groupby(reference(), key=lambda row: row.section):
        if name:
            doc = (sections()[name].__doc__ or "").strip().splitlines()[0]
            parts.append(f"\n## {name}\n\n{doc}\n")
        else:
            parts.append("\n## Outside the sections\n")
        parts.append("\n| key | value | default | meaning |\n|---|---|---|---|\n")
        parts.extend(_line(row) for row in rows)
    return "".join(parts)


def _line(row: KeyReference) -> str:
    default = row.default if row.default == "required" else f"`{row.default}`"
    meaning = _escape(" ".join(row.description.split()))
    return f"| `{row.key}` | {_value(row)} | {default} | {meaning} |\n"


def _value(row: KeyReference) -> str:
    """What may stand there: the choices, or the type with its range."""
    kinds = row.type.split(" or ")
    choices = [f"`{choice}`" for choice in row.allowed.split(", ")]
    if kinds[0] == "string" and row.allowed not in ("", "not empty"):
        return " or ".join([*choices, *kinds[1:]])
    bounds = "" if row.allowed in ("", "not empty") else " " + _escape(row.allowed)
    return " or ".join([kinds[0] + bounds, *kinds[1:]])


def _escape(text: str) -> str:
    """Plain text for a table's cell: `code` stays code, all other markup is text."""
    parts = text.split("`")
    for at in range(0, len(parts), 2):
        for sign in "\\_*<":
            parts[at] = parts[at].replace(sign, "\\" + sign)
    return "`".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
