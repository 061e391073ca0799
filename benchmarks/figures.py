"""Plots from results, as SVG with nothing in it that changes from run to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from arms import NAMES
from tables import LABELS, MAIN, OPS, SHORT, Book, good, times

# one colour an arm, told apart in grey too
_COLORS = {
    "triton": "#1f4e9c",
    "eager": "#8fb3e8",
    "compile": "#c1440e",
    "dense": "#e9a178",
    "deepspeed": "#5b8c5a",
    "liger": "#8a5a9e",
    "trl": "#b8a03a",
}
_MARKS = dict(zip(OPS, "osD^v<>", strict=True))


def draw(book: Book, folder: Path) -> dict[str, str]:
    """Write every plot that there are results for; file names and what they show."""
    plots: list[tuple[str, str, Callable[[Book], Figure | None]]] = [
        ("floor.svg", f"Time over the byte floor, {MAIN[0]} x {MAIN[1]}, bf16", _floor),
        ("rows.svg", f"Time by rows, {MAIN[1]} columns, bf16", _rows),
        ("widths.svg", f"Triton: time over the byte floor by width, {MAIN[0]} rows", _widths),
    ]
    drawn = {}
    style: dict[str, Any] = {"svg.hashsalt": "vocabtp", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(style):
        for name, text, plot in plots:
            figure = plot(book)
            if figure is None:
                (folder / name).unlink(missing_ok=True)
                continue
            figure.suptitle(f"{text}, forward + backward", fontsize=10)
            figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")
            drawn[name] = text
    return drawn


def _floor(book: Book) -> Figure | None:
    """Bars: every arm of every op at the main shape."""
    bars = [
        (op, arm, result["floor"])
        for op in OPS
        for arm in NAMES
        if (result := book.get(op, "train", arm, "bfloat16", MAIN)) and good(result)
    ]
    if not bars:
        return None
    figure = Figure(figsize=(7.5, 0.9 + 0.17 * (len(bars) + len(OPS))), layout="constrained")
    axes = figure.add_subplot()
    at, ticks = 0.0, []
    for op in OPS:
        here = [(arm, value) for name, arm, value in bars if name == op]
        if not here:
            continue
        ticks.append((at + (len(here) - 1) / 2, OPS[op]))
        for arm, value in here:
            axes.barh(at, value, height=0.85, color=_COLORS[arm])
            axes.text(value * 1.05, at, times(value), va="center", fontsize=7)
            at += 1
        at += 1
    axes.set_xscale("log")
    axes.set_xlim(0.8, 2.2 * max(value for _, _, value in bars))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(at - 0.5, -1)
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    axes.set_xlabel("time / time to copy the bytes that must move (log)")
    arms = [arm for arm in NAMES if any(arm == name for _, name, _ in bars)]
    handles = [mpl.patches.Patch(color=_COLORS[arm], label=LABELS[arm]) for arm in arms]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(arms), frameon=False)
    return figure


def _rows(book: Book) -> Figure | None:
    """Lines: time of Triton and torch.compile by rows, and the floor, an op a panel."""
    sizes = book.values("rows")
    series = {
        (op, arm): [
            (n, result)
            for n in sizes
            if (result := book.get(op, "train", arm, "bfloat16", (n, MAIN[1]))) and good(result)
        ]
        for op in OPS
        for arm in ("triton", "compile")
    }
    ops = [op for op in OPS if series[op, "triton"]]
    if not ops:
        return None
    across = min(len(ops), 4)
    down = -(-len(ops) // across)
    figure = Figure(figsize=(2.3 * across + 0.6, 2.1 * down + 0.6), layout="constrained")
    for i, op in enumerate(ops):
        axes = figure.add_subplot(down, across, i + 1)
        for arm in ("triton", "compile"):
            if points := series[op, arm]:
                xs, found = zip(*points, strict=True)
                ys = [r["median_ms"] for r in found]
                axes.plot(xs, ys, marker="o", markersize=3, color=_COLORS[arm], label=LABELS[arm])
        floor = [(n, r["median_ms"] / r["floor"]) for n, r in series[op, "triton"]]
        axes.plot(*zip(*floor, strict=True), "k:", linewidth=0.9, label="byte floor")
        axes.set(xscale="log", yscale="log", title=OPS[op])
        axes.set_xticks(sizes, [str(n) for n in sizes], fontsize=7)
        axes.minorticks_off()
        axes.title.set_fontsize(8)
        if i % across == 0:
            axes.set_ylabel("ms")
    figure.axes[0].legend(frameon=False, fontsize=7)
    return figure


def _widths(book: Book) -> Figure | None:
    """Lines: Triton's time over the floor by width, a dtype a panel; dashed where sliced."""
    dtypes = book.have("dtype", SHORT)
    widths = book.values("cols")
    figure = Figure(figsize=(3.6 * max(len(dtypes), 1) + 0.4, 3.4), layout="constrained")
    drawn = False
    for i, dtype in enumerate(dtypes):
        axes = figure.add_subplot(1, len(dtypes), i + 1)
        for (op, label), color in zip(OPS.items(), mpl.color_sequences["tab10"], strict=False):
            for layout, line in (("contiguous", "-"), ("sliced", "--")):
                points = [
                    (at, r["floor"])
                    for at, width in enumerate(widths)
                    if (r := book.get(op, "train", "triton", dtype, (MAIN[0], width), layout))
                    and good(r)
                ]
                if points:
                    drawn = True
                    name = label if layout == "contiguous" else None
                    style = {"marker": _MARKS[op], "markersize": 3, "linewidth": 1}
                    axes.plot(*zip(*points, strict=True), line, color=color, label=name, **style)
        axes.set_xticks(range(len(widths)), [str(w) for w in widths], rotation=30, fontsize=7)
        axes.set_title(SHORT[dtype], fontsize=9)
        axes.set_ylabel("x byte floor" if i == 0 else "")
        axes.axhline(1, color="black", linewidth=0.6)
    if not drawn:
        return None
    figure.axes[0].legend(frameon=False, fontsize=6)
    return figure
