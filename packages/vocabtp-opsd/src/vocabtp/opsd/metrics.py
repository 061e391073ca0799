"""What a run measures: metrics.jsonl, TensorBoard events, and progress for whoever watches.

All of it belongs to rank 0 alone. A record of metrics.jsonl is one JSON object with `step`, `kind`
and the values; NaN and infinities, which JSON lacks, are the strings "NaN", "Infinity" and
"-Infinity", so that no divergence looks like a missing value.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from vocabtp.opsd._console import write_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task

Value = float | int | str | None | Sequence["Value"] | Mapping[str, "Value"]


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard; safe to resume into.

    Args:
        folder: Output directory; made if it is missing.
        resumed_step: The step that the run continues from; 0 is a new run, which drops all old
            records. Records of later steps, which a stopped run left behind, are dropped, and so
            is a half-written last line.
        tensorboard: Also write TensorBoard events, to `folder/tensorboard`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, resumed_step: int = 0, tensorboard: bool = True
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(self.path, resumed_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            events = self.path.parent / "tensorboard"
            try:
                self._events = SummaryWriter(str(events), purge_step=resumed_step + 1)
            except OSError:
                self._file.close()
                raise

    def write(self, step: int, values: Mapping[str, Value], *, kind: str = "train") -> None:
        """Adds one record, and gives every number of it to TensorBoard as `kind/name`.

        Args:
            step: The optimizer step that was just done, from 1; 0 is before the first.
            values: Numbers, or lists and mappings of numbers, by name.
            kind: `train`, `eval`, or any other group of records.
        """
        record = {"step": step, "kind": kind, **{k: _jsonable(v) for k, v in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for tag, number in _numbers(kind, values):
                self._events.add_scalar(tag, number, step)

    def close(self) -> None:
        """Closes both; a second call does nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order; a half-written last line is left out."""
    records = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append({key: _number(value) for key, value in record.items()})
    return records


class Progress:
    """A progress bar on a terminal, plain lines elsewhere: loss, tokens/s, time left.

    Args:
        total: Steps of the whole run.
        done: Steps that a resumed run starts from.
        every: Steps between two plain lines.
        stream: Where to; standard output by default.
    """

    def __init__(
        self, total: int, *, done: int = 0, every: int = 1, stream: TextIO | None = None
    ) -> None:
        self._total, self._done, self._every = total, done, every
        self._stream = sys.stdout if stream is None else stream
        self._start, self._started_from = time.monotonic(), done
        self._bar: RichProgress | None = None
        if self._stream.isatty():
            self._bar = _rich_bar(self._stream)
            self._task = self._bar.add_task("", total=total, completed=done, loss="", speed="")
            self._bar.start()

    def update(self, step: int, *, loss: float | None, tokens_per_s: float, note: str = "") -> None:
        """Shows that `step` steps are done; a step without a loss was skipped."""
        shown = "skipped" if loss is None else f"{loss:.4f}"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, loss=shown, speed=f"{tokens_per_s:,.0f} tokens/s"
            )
        elif step % self._every == 0 or step == self._total or step == self._started_from + 1:
            left = _clock(self._seconds_left(step))
            tail = f"  {note}" if note else ""
            self.log(
                f"step {step}/{self._total}  loss {shown}  {tokens_per_s:,.0f} tokens/s  "
                f"left {left}{tail}"
            )

    def log(self, line: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            write_line(line, self._stream)

    def close(self) -> None:
        """Ends the bar; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _seconds_left(self, step: int) -> float:
        passed = step - self._started_from
        return (time.monotonic() - self._start) / max(passed, 1) * (self._total - step)


def _rich_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    class TimeLeft(TextColumn):
        def render(self, task: Task) -> Any:
            return f"left {_clock(task.time_remaining)}"

    return RichProgress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeLeft(""),
        console=Console(file=stream),
        # the rate of the first steps (warm caches, short answers) misleads for long runs
        speed_estimate_period=120,
    )


def _clock(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _drop_after(path: Path, step: int) -> None:
    """Keeps the records up to a step, by one atomic replacement of the file."""
    if not path.exists():
        return
    old = path.read_bytes()
    kept = []
    for line in old.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        at = record.get("step", 0) if isinstance(record, dict) else None
        if isinstance(at, int) and 0 < step >= at:
            kept.append(line + b"\n")
    new = b"".join(kept)
    if new != old:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(new)
        os.replace(temporary, path)


def _jsonable(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return value


def _number(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _numbers(tag: str, value: Value) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{tag}/{key}", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _numbers(f"{tag}/{i}", inner)
    elif isinstance(value, int | float):
        yield tag, float(value)
