"""MkDocs hook: formulas become MathML when the site is built.

Browsers draw MathML themselves, so the site needs no script, font or network for it.
"""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S
)


def on_page_content(content: str, **_: object) -> str:
    """Replace what pymdownx.arithmatex marked as TeX."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["kind"] == "[" else "inline"
    tag = found["tag"]
    # the converter sets a function and its argument without a space
    tex = (
        html.unescape(found["tex"])
        .strip()
        .replace(r"\log ", r"\log\,")
        .replace(r"\max ", r"\max\,")
    )
    formula = convert(tex, display=display)
    return f"<{tag}>{formula}</{tag}>"
