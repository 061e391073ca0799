"""Placeholders of prompt templates."""

from __future__ import annotations

import re
import string

from vocabtp.opsd._fields import RuleError


def template_fields(template: str) -> list[str]:
    """The field names in a prompt template, in order and without repeats.

    Raises:
        RuleError: An unbalanced brace, an empty or numbered placeholder, an index, an attribute,
            a conversion or a format.
    """
    key = "teacher.prompt_template"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise RuleError(key, f"is no template ({error}); write {{{{ for a brace") from None
    names: list[str] = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or name.isdigit() or spec or conversion or re.search(r"[.\[\]]", name):
            raise RuleError(
                key, f"has the placeholder {{{name}}}: only plain field names such as {{prompt}}"
            )
        if name not in names:
            names.append(name)
    return names
