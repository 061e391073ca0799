"""Tables and plots of the docs from files of results; a later file's measurement counts.

    python benchmarks/plot.py benchmarks/results/*.json                  tables, to the terminal
    python benchmarks/plot.py benchmarks/results/*.json --docs docs      and into the docs

With --docs it writes DOCS/assets/benchmarks/*.svg and, in DOCS/benchmarks.md, what stands between
`<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import figures
import tables
from results import Result, load

PARTS: dict[str, Callable[[tables.Book], str]] = {
    "machine": tables.machine,
    "shapes": tables.shapes,
    "detail": tables.detail,
    "both": tables.both_gradients,
    "few": tables.few_rows,
    "grid": partial(tables.grid, arm="triton"),
    "eager": partial(tables.grid, arm="eager"),
    "tp": tables.sharded,
}


def collect(paths: Iterable[Path]) -> tables.Book:
    """All runs and results of some files."""
    runs: list[dict[str, Any]] = []
    found: dict[tuple[object, ...], Result] = {}
    for path in paths:
        loaded = load(path)
        shift = len(runs)
        numbers = {run["id"]: shift + i for i, run in enumerate(loaded["runs"])}
        runs += loaded["runs"]
        for result in loaded["results"]:
            found[tables.place(result)] = {**result, "run": numbers[result["run"]]}
    devices = {result["device"] for result in found.values()}
    if len(devices) > 1:
        raise SystemExit(f"results of one device at a time, got {', '.join(sorted(devices))}")
    return tables.Book(runs, found)


def fill(text: str, parts: dict[str, str]) -> str:
    """The page with each part between its marks; a part without marks is an error."""
    for name, content in parts.items():
        marks = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(marks[0])}\n.*?{re.escape(marks[1])}", re.DOTALL)
        whole = f"{marks[0]}\n\n{content}\n\n{marks[1]}"
        text, count = pattern.subn(lambda _, whole=whole: whole, text)
        if count != 1:
            raise SystemExit(f"benchmarks.md: needs one {marks[0]} and its end, has {count}")
    return text


def main(argv: list[str]) -> None:
    """Print the tables, or write the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--docs", type=Path, help="the folder with benchmarks.md")
    args = parser.parse_args(argv)
    book = collect(args.results)
    parts = {name: part(book) or "Nothing was measured." for name, part in PARTS.items()}
    if args.docs is None:
        print("\n\n".join(parts.values()))
        return
    folder = args.docs / "assets" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(book, folder)
    images = [f"![{text}](assets/benchmarks/{name})" for name, text in drawn.items()]
    parts["plots"] = "\n\n".join(images) or "Nothing was measured."
    page = args.docs / "benchmarks.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), parts), encoding="utf-8")
    print(f"wrote {page} and {', '.join(drawn) or 'no plot'}")


if __name__ == "__main__":
    main(sys.argv[1:])
