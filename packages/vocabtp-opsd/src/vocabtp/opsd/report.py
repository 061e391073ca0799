"""The end of a run: the table on the terminal, and report.html, one file that needs no network."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
import io
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vocabtp.opsd._console import write_line
from vocabtp.opsd._version import __version__
from vocabtp.opsd.metrics import read_metrics

if TYPE_CHECKING:
    from vocabtp.opsd.config import Config

# record name -> label; one chart each, both kinds of records over the same steps
CURVES = {
    "loss": "loss",
    "reverse_kl": "KL(student || teacher)",
    "forward_kl": "KL(teacher || student)",
    "exact_match": "exact match",
    "student_entropy": "student entropy",
    "teacher_entropy": "teacher entropy",
    "top1_agreement": "top-1 agreement",
    "response_length": "response length",
    "truncated": "share of answers cut",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_s": "tokens/s",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One held-out prompt with the student's answer before and after training."""

    prompt: str
    before: str
    after: str
    answer: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers that a run ends with; None where nothing was evaluated.

    Attributes:
        steps: Optimizer steps of the run, skipped ones included.
        skipped_steps: Steps without a response token or with a gradient that is not finite.
        seconds: Wall time of the training alone.
        exact_match: Share of held-out prompts answered right, before and after.
        reverse_kl: Mean KL(student || teacher) a token on held-out prompts, before and after.
        tokens_per_s: Response tokens trained on per second, over all ranks.
        peak_memory: Bytes of each rank at its peak, in rank order.
    """

    steps: int
    skipped_steps: int
    seconds: float
    exact_match: tuple[float | None, float | None]
    reverse_kl: tuple[float | None, float | None]
    tokens_per_s: float
    peak_memory: Sequence[int]

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, before, after; what has no "before" stands under "after"."""
        peak = ", ".join(f"{n / 2**20:,.0f}" for n in self.peak_memory) or "-"
        return [
            ("exact match, held out", *_shown(self.exact_match, ".1%")),
            ("reverse KL to the teacher", *_shown(self.reverse_kl, ".4f")),
            ("optimizer steps (skipped)", "", f"{self.steps} ({self.skipped_steps})"),
            ("training time", "", f"{self.seconds:,.1f} s"),
            ("tokens/s", "", f"{self.tokens_per_s:,.0f}"),
            ("peak memory a rank, MiB", "", peak),
        ]


def write_report(
    folder: str | os.PathLike[str],
    *,
    config: Config,
    summary: Summary,
    samples: Sequence[Sample] = (),
) -> Path:
    """Writes report.html from a run's metrics.jsonl, configuration and samples.

    Args:
        folder: Output directory of the run, with metrics.jsonl.
        config: The resolved configuration.
        summary: What the run ends with.
        samples: Some held-out prompts, answered before and after.

    Returns:
        The path of report.html.
    """
    import jinja2

    metrics = Path(folder) / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    source = importlib.resources.files("vocabtp.opsd").joinpath("report.html.j2").read_text("utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    path = Path(folder) / "report.html"
    text = page.render(
        title=f"{Path(config.student.model_name_or_path).name} learns from "
        f"{Path(config.teacher.model_name_or_path).name}",
        rows=summary.rows(),
        curves=curves(records),
        samples=samples,
        config=config.dump(),
        environment=environment(),
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path


def print_summary(summary: Summary, report: Path | None, stream: TextIO | None = None) -> None:
    """Prints the final table, and the report's path on a line of its own that never wraps."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "before", "after")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in summary.rows():
        table.add_row(*row)
    stream = sys.stdout if stream is None else stream
    Console(file=stream, width=None if stream.isatty() else 100).print(table)
    if report is not None:
        write_line(f"report: {report}", stream)


def curves(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Label and SVG of each chart that the records have numbers for."""
    charts = []
    for name, label in CURVES.items():
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in records:
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                kind = str(record.get("kind", ""))
                lines.setdefault(kind, []).append((int(record["step"]), float(value)))
        if lines:
            charts.append((label, _svg(lines, label)))
    return charts


def environment() -> dict[str, str]:
    """Versions and hardware of this process, for the report and the doctor."""
    import torch

    import vocabtp.cache
    import vocabtp.dist
    import vocabtp.kernels

    facts = {
        "vocabtp-opsd": __version__,
        "vocabtp-cache": vocabtp.cache.__version__,
        "vocabtp-dist": vocabtp.dist.__version__,
        "vocabtp-kernels": vocabtp.kernels.__version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
    }
    libraries = ("torch", "transformers", "tokenizers", "safetensors", "triton", "deepspeed")
    for name in (*libraries, "numpy"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    # with the local part, which says what the build is for
    facts["torch"] = str(torch.__version__)
    facts["CPUs"] = str(os.cpu_count())
    facts["accelerators"] = ", ".join(_accelerators(torch)) or "none"
    return facts


def _accelerators(torch: Any) -> list[str]:
    names = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            names += [module.get_device_name(i) for i in range(module.device_count())]
    return names


def _svg(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # without a salt and with a date, equal runs would give different files
    with mpl.rc_context({"svg.hashsalt": label, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for kind, points in lines.items():
            marker = "o" if len(points) < 20 else ""
            axes.plot(*zip(*points, strict=True), label=kind, marker=marker, markersize=3)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _shown(pair: tuple[float | None, float | None], form: str) -> tuple[str, str]:
    before, after = ("-" if value is None else format(value, form) for value in pair)
    return before, after
