"""Names every source file and every function that is longer than this house allows.

Usage: lengths.py [FOLDER...], the sources of the packages if none is named.

A file has at most 300 lines, a function at most 60 and a Triton kernel at most 80, not counting
docstrings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
FILE, FUNCTION, KERNEL = 300, 60, 80
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(node: Scope) -> int:
    """How many lines the node's own docstring takes."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def too_long(path: Path) -> Iterator[str]:
    """One line of text for each rule that the file breaks."""
    text = path.read_text(encoding="utf-8")
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, Scope)]
    lines = len(text.splitlines()) - sum(map(docstring_lines, nodes))
    if lines > FILE:
        yield f"{path}:1: {lines} lines without docstrings, at most {FILE}"
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        limit = KERNEL if any("jit" in ast.dump(d) for d in node.decorator_list) else FUNCTION
        lines = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)
        if lines > limit:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {limit}"


def main(folders: list[str]) -> int:
    """Print what is too long; 1 if anything is."""
    roots = [Path(f) for f in folders] or sorted(PACKAGES.glob("*/src"))
    files = sorted(f for root in roots for f in root.rglob("*.py"))
    found = [line for file in files for line in too_long(file)]
    if not files:
        found = [f"no Python file under {' '.join(map(str, roots))}"]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
