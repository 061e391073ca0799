"""Tables and plots of docs/cache.md from a file that benchmarks/cache.py wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from plot import fill

Row = dict[str, Any]
_COLORS = ("#1f4e9c", "#c1440e", "#5b8c5a", "#8a5a9e")
_NAMES = {
    "contiguous pinned": "one contiguous copy",
    "cache.fetch": "`fetch`",
    ".to(device)": "a slice of a pinned tensor, `.to(device)`",
    "staging buffer": "through a pinned buffer that is used again",
    "store": "`store`",
    "store, donated": "`store(donate=True)`",
}


def write(file: dict[str, Any], docs: Path) -> None:
    """Write DOCS/assets/cache/*.svg and the parts of DOCS/cache.md."""
    rows: dict[str, list[Row]] = {}
    for row in file["results"]:
        rows.setdefault(row["part"], []).append(row)
    made = {"machine": _machine(file["run"])}
    for name, part in (("fetch", _fetch), ("store", _store), ("step", _step), ("hidden", _hidden)):
        made[name] = part(rows[name]) if name in rows else "Nothing was measured."
    made["locked"] = "Nothing was measured."
    if "locked" in rows:
        folder = docs / "assets" / "cache"
        folder.mkdir(parents=True, exist_ok=True)
        style: dict[str, Any] = {"svg.hashsalt": "vocabtp", "svg.fonttype": "none", "font.size": 9}
        with mpl.rc_context(style):
            figure = _locked(rows["locked"])
            figure.savefig(folder / "locked.svg", metadata={"Date": None}, facecolor="white")
        made["locked"] = "![Locked memory over steps of random lengths](assets/cache/locked.svg)"
    page = docs / "cache.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(f"wrote {page}")


def _machine(run: Row) -> str:
    commit = (run["commit"] or "unknown")[:10]
    return f"{run['device']}, torch {run['torch']}, commit {commit}, {run['date'][:10]}."


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _size(shape: list[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _fetch(rows: list[Row]) -> str:
    return _table(
        ["chunk, bf16", "how", "ms a chunk", "GB/s", "of one contiguous copy"],
        [
            [
                _size(row["chunk"]),
                _NAMES[row["arm"]],
                f"{row['ms'] / row['chunks']:.2f}",
                f"{row['gb_s']:.1f}",
                f"{row['of_contiguous']:.1%}",
            ]
            for row in rows
        ],
    )


def _store(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        held = "host_bytes" in row
        lines.append(
            [
                _size(row["shape"]),
                _NAMES[row["arm"]],
                f"{row['ms']:.1f}",
                f"{row['gb_s']:.1f}",
                f"{row['of_contiguous']:.1%}",
                f"{row['held_ms']:.1f}" if held else "",
                f"{row['host_bytes'] / row['bytes'] - 1:.2%}" if held else "",
                f"{row['pool_bytes'] / row['bytes'] - 1:.2%}" if held else "",
            ]
        )
    head = ["rows, bf16", "how", "ms", "GB/s", "of one contiguous copy"]
    head += ["ms until the producer's stream goes on", "host bytes above the rows'", "locked above"]
    return _table(head, lines)


def _step(rows: list[Row]) -> str:
    first = rows[0]
    layers, width, inner = first["student"]
    lines = []
    for row in rows:
        arm = row["arm"]
        if arm.startswith("cache"):
            arm = f"in the cache, at most {row['budget'] / row['bytes']:.0%} ahead"
        elif arm.startswith("store"):
            arm = "stored in the step, then all of it ahead"
        elif arm == "on the device":
            arm = "the step with the teacher's rows on the device"
        low, high = row["range_ms"]
        line = [arm, f"{row['ms']:.1f}", f"{low:.1f} to {high:.1f}", "", "", ""]
        if "hidden" in row:
            low, high = row["hidden_range"]
            line[3:] = f"{row['copy_ms']:.1f}", f"{row['exposed_ms']:.1f}", ""
            line[5] = f"{row['hidden']:.1%} ({low:.1%} to {high:.1%})"
        lines.append(line)
    about = (
        f"Student: {layers} layers of width {width} (inner {inner}); {first['rows']} rows of "
        f"{first['cols']} columns in bf16, {first['bytes'] / 1e9:.2f} GB, chunks of "
        f"{first['chunk']} rows; reverse KL. {first['queued']} steps in a row a sample."
    )
    head = ["", "ms a step", "all rounds", "ms of its copies alone", "ms longer unhidden"]
    return f"{about}\n\n" + _table([*head, "of these hidden (all rounds)"], lines)


def _hidden(rows: list[Row]) -> str:
    pairs: dict[int, dict[str, Row]] = {}
    for row in rows:
        pairs.setdefault(row["width"], {})[row["arm"]] = row
    first = rows[0]
    lines = []
    for width, pair in pairs.items():
        a, b = pair["hidden"], pair["logits"]
        lines.append(
            [
                str(width),
                f"{a['row_bytes']} / {b['row_bytes']}",
                f"{a['store_ms']:.2f} / {b['store_ms']:.2f}",
                f"{a['fetch_ms']:.2f} / {b['fetch_ms']:.2f}",
                f"{a['differ']:.2%}",
                f"{a['relative']:.1e}",
                f"{a['kl']:.1e}",
            ]
        )
    head = ["H", "bytes a row", "ms to store", "ms to fetch all", "numbers that differ"]
    head += ["largest difference over the number", "mean KL"]
    about = (
        f"{first['rows']} rows of {first['cols']} columns in bf16, fetched {first['chunk']} at a "
        "time; hidden / logits."
    )
    return f"{about}\n\n" + _table(head, lines)


def _locked(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(7.0, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for row, color in zip(rows, _COLORS, strict=False):
        steps = [i * row["every"] for i in range(len(row["held"]))]
        axes.plot(steps, [n / 1e6 for n in row["held"]], color=color, label=row["arm"])
    for row in rows[-1:]:
        steps = [i * row["every"] for i in range(len(row["largest"]))]
        largest = [n / 1e6 for n in row["largest"]]
        axes.plot(steps, largest, color="black", ls=":", label="largest payload so far")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("page-locked memory, MB")
    axes.legend(frameon=False)
    return figure
