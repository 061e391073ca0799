"""What rank 0 writes for people: config.yaml, metrics.jsonl, progress, report.html, the table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vocabtp.opsd.config import Config
from vocabtp.opsd.errors import UserError
from vocabtp.opsd.evaluate import Evaluation
from vocabtp.opsd.metrics import MetricsWriter, Progress
from vocabtp.opsd.report import Sample, Summary, print_summary, write_report


class Output:
    """The output directory of a run, on the rank that owns it; silent on all others.

    Args:
        config: The resolved configuration.
        is_main: Whether this rank writes.
        total: Steps of the whole run.
        done: Steps that a resumed run starts from.
    """

    def __init__(self, config: Config, *, is_main: bool, total: int, done: int) -> None:
        self.config, self.folder = config, Path(config.training.save_dir)
        self.fault = ""  # why this rank could not write; the run ends on all ranks
        self._metrics: MetricsWriter | None = None
        self._progress: Progress | None = None
        if not is_main:
            return
        try:
            self._metrics = MetricsWriter(self.folder, resumed_step=done)
            self._progress = Progress(total, done=done, every=config.training.logging_steps)
            (self.folder / "config.yaml").write_text(config.dump(), encoding="utf-8")
        except OSError as error:
            self.close()
            raise UserError(f"training.save_dir: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End bar and files; a second call does nothing."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()

    def step(self, step: int, metrics: Mapping[str, Any], note: str = "") -> None:
        """Record optimizer step `step`, counted from 1."""
        if self._metrics is None or self._progress is None:
            return
        self._write(step, metrics, "train")
        self._progress.update(
            step,
            loss=metrics["loss"] if metrics["applied"] else None,
            tokens_per_s=metrics["tokens_per_s"],
            note=note,
        )

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Record an evaluation after `step` steps."""
        if self._metrics is None:
            return
        self._write(step, found.numbers(), "eval")
        self.say(
            f"held out after step {step}: exact match {found.exact_match:.1%}, reverse KL to the "
            f"teacher {found.reverse_kl:.4f}, {found.examples} prompts"
        )

    def _write(self, step: int, values: Mapping[str, Any], kind: str) -> None:
        assert self._metrics is not None
        try:
            self._metrics.write(step, values, kind=kind)
        except OSError as error:  # the other ranks have to hear of it first
            self.fault = f"training.save_dir: {error}"

    def say(self, line: str) -> None:
        """Print a line of its own."""
        if self._progress is not None:
            self._progress.log(line)

    def finish(
        self,
        summary: Summary,
        before: Evaluation | None,
        after: Evaluation | None,
    ) -> Path | None:
        """Write the report and print the final table; the report's path on rank 0."""
        if self._metrics is None:
            return None
        self.close()
        samples = []
        if before is not None and after is not None:
            # by prompt: a run that resumed on other ranks, or other held-out rows, has other ones
            later = {a["prompt"]: a for a in after.samples}
            samples = [
                Sample(
                    prompt=b["prompt"],
                    before=b["response"],
                    after=later[b["prompt"]]["response"],
                    answer=b["answer"],
                )
                for b in before.samples
                if b["prompt"] in later
            ]
        path = write_report(self.folder, config=self.config, summary=summary, samples=samples)
        print_summary(summary, path)
        return path
