"""The loop of a run: resume, evaluate, step, save, stop when asked to."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vocabtp.opsd.checkpoint_files import Saved
from vocabtp.opsd.engine import Engine
from vocabtp.opsd.errors import CheckpointError, Interrupted, ModelError, NotFiniteError, UserError
from vocabtp.opsd.evaluate import Evaluation, evaluate
from vocabtp.opsd.interrupt import InterruptFlag
from vocabtp.opsd.output import Output
from vocabtp.opsd.report import Summary
from vocabtp.opsd.session import checksum
from vocabtp.opsd.step import Stepper, StepReport

if TYPE_CHECKING:
    from vocabtp.opsd.trainer import Trainer


_LAST_SAVE_S = 30.0  # for a checkpoint under way when a run fails


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    summary: Summary  # the numbers of the final table, equal on all ranks
    before: Evaluation | None
    after: Evaluation | None
    checkpoint: Path
    report: Path | None  # on rank 0
    teacher_checksum: int  # of this rank's part: the same before and after


class _StopRequest(Exception):
    """Raised on all ranks alike, inside the loop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Run:
    """One call of `Trainer.train`."""

    def __init__(self, trainer: Trainer, engine: Engine, flag: InterruptFlag) -> None:
        self.trainer, self.engine, self.flag = trainer, engine, flag
        self.config, self.layout = trainer.config, trainer.layout
        self.inputs, self.models = trainer.inputs, trainer.models
        self.step = 0  # optimizer steps done
        self.saved_step = -1
        self.counters = dict.fromkeys(
            ("skipped_steps", "skipped_in_a_row", "tokens", "seconds"), 0.0
        )
        self.before: Evaluation | None = None
        self.peak_bytes: list[int] = []

    def go(self) -> TrainResult:
        """Train to the last step.

        Raises:
            Interrupted: On every rank, after a checkpoint was written.
        """
        teacher = checksum(self.models.teacher.model)
        self._resume()
        total = self.trainer.total_steps
        with self.layout.together():
            output = Output(self.config, is_main=self.layout.is_main, total=total, done=self.step)
        with output as self.output:
            try:
                after = self._loop(total)
                self.trainer.checkpoints.wait()
            except _StopRequest as stop:
                try:
                    self.trainer.checkpoints.wait()
                except CheckpointError as error:  # on all ranks; this step's may still be written
                    self.output.say(str(error))
                path = self._save()
                self.trainer.checkpoints.wait()
                name = signal.Signals(stop.signum).name
                self.output.say(f"{name}: stopped after step {self.step}, saved {path}")
                raise Interrupted(stop.signum) from None
            finally:
                self.trainer.checkpoints.give_time(_LAST_SAVE_S)
            if checksum(self.models.teacher.model) != teacher:
                raise ModelError("the teacher's weights changed during the run")
            summary = self._summary(after)
            report = self.output.finish(summary, self.before, after)
            # a process that ends earlier resets connections that its peers still use
            self._agreed_signal()
        return TrainResult(
            summary=summary,
            before=self.before,
            after=after,
            checkpoint=self.trainer.checkpoints.path(self.step),
            report=report,
            teacher_checksum=teacher,
        )

    def _summary(self, after: Evaluation | None) -> Summary:
        before, seconds = self.before, self.counters["seconds"]
        return Summary(
            steps=self.step,
            skipped_steps=int(self.counters["skipped_steps"]),
            seconds=seconds,
            exact_match=(
                None if before is None else before.exact_match,
                None if after is None else after.exact_match,
            ),
            reverse_kl=(
                None if before is None else before.reverse_kl,
                None if after is None else after.reverse_kl,
            ),
            tokens_per_s=self.counters["tokens"] / seconds if seconds else 0.0,
            peak_memory=self.peak_bytes,
        )

    def _loop(self, total: int) -> Evaluation | None:
        training = self.config.training
        stepper = Stepper(
            self.config,
            self.layout,
            self.inputs.train,
            self.models,
            self.engine,
            self.trainer.phases,
        )
        if self.before is None and self.step == 0:
            self.before = self._evaluate()
        while self.step < total:
            report = self._step(stepper)
            self.step += 1
            self._record(report)
            if report.signum:
                raise _StopRequest(report.signum)
            if training.save_steps and self.step % training.save_steps == 0:
                self._save()
            if training.eval_steps and self.step % training.eval_steps == 0 and self.step < total:
                self._evaluate()
        self._save()
        return self._evaluate()

    def _step(self, stepper: Stepper) -> StepReport:
        """One step, or none at all: a signal ends it between two micro-batches."""
        rng = self.trainer.checkpoints.rng()
        try:
            return stepper.run(self.step, lambda: self.flag.signum, self._tick)
        except _StopRequest:
            # the checkpoint that follows must continue as if this step had not begun
            self.engine.zero_grad()
            self.trainer.forget_models()
            self.trainer.checkpoints.set_rng(rng)
            raise

    def _resume(self) -> None:
        found = self.trainer.resume_point()
        if found is None:
            return
        path, saved = found
        with self.trainer.phases.enter("load"):
            self.trainer.checkpoints.load(path, self.models.student.module, self.engine)
        self.step = self.saved_step = saved.step
        self.counters |= saved.counters
        if saved.before is not None:
            self.before = Evaluation(**saved.before)
        if self.step < self.trainer.total_steps:
            self.trainer.notice(f"resumed from {path}: step {self.step + 1} is the next")
        else:
            self.trainer.notice(
                f"{path} is the end of the run: no step is left to train; raise "
                "training.max_steps, or start anew with another training.save_dir"
            )

    def _record(self, report: StepReport) -> None:
        result, metrics = report.result, report.metrics
        self.peak_bytes = report.peak_bytes
        self.counters["skipped_steps"] += not result.applied
        self.counters["tokens"] += metrics["response_tokens"]
        self.counters["seconds"] += metrics["seconds"]
        metrics["skipped_steps"] = int(self.counters["skipped_steps"])
        metrics["peak_memory"] = report.peak_bytes
        if not result.applied:
            self.output.say(f"step {self.step} skipped: {result.reason}")
        if metrics["empty_responses"]:
            self.output.say(
                f"step {self.step}: {metrics['empty_responses']} sample(s) without a response, "
                "their prompts fill the context"
            )
        self.output.step(self.step, metrics)
        self._limit_skipped(report)

    def _limit_skipped(self, report: StepReport) -> None:
        """Stop, on all ranks alike, where one step after the other comes out NaN or infinite."""
        if not report.metrics["response_tokens"]:
            return  # neither good nor bad
        row = 0 if report.result.applied else int(self.counters["skipped_in_a_row"]) + 1
        self.counters["skipped_in_a_row"] = row
        limit = self.config.training.max_skipped_steps
        if row >= limit:
            raise NotFiniteError(
                f"{row} steps in a row were skipped, the last one, step {self.step}, because "
                f"{report.result.reason}; lower training.learning_rate, try training.attention "
                f"eager, or raise training.max_skipped_steps ({limit})"
            )

    def _evaluate(self) -> Evaluation | None:
        held_out = self.inputs.held_out
        if held_out is None:
            return None
        with self.trainer.phases.enter("evaluation"):
            found = evaluate(
                self.config,
                self.layout,
                self.models,
                held_out,
                tick=self._tick,
                stop=lambda: self.flag.signum != 0,
            )
        self.output.evaluation(self.step, found)
        return found

    def _tick(self, done: int, total: int) -> None:
        """Between two batches, of a step or an evaluation: stop if any rank was told to."""
        if found := self._agreed_signal():
            raise _StopRequest(found)

    def _agreed_signal(self) -> int:
        fault = self.output.fault
        seen = torch.tensor([self.flag.signum, len(fault)], device=self.layout.device)
        if self.layout.world > 1:
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.layout.world_group)
        signum, faulty = seen.tolist()
        if faulty:
            raise UserError(fault or "training.save_dir: rank 0 cannot write there")
        return int(signum)

    def _save(self) -> Path:
        """Write a checkpoint, unless this step has one."""
        if self.saved_step == self.step:
            return self.trainer.checkpoints.path(self.step)
        before = self.before
        saved = Saved(
            step=self.step,
            counters=dict(self.counters),
            config=self.config.flat(),
            data={"train": self.inputs.train.digest},
            layout={"tp": self.layout.tp, "dp": self.layout.dp},
            before=None if before is None else {**before.numbers(), "samples": before.samples},
        )
        with self.trainer.phases.enter("save"):
            path = self.trainer.checkpoints.save(
                self.models.student.module,
                self.engine,
                saved,
                background=self.config.training.async_save,
            )
        self.saved_step = self.step
        return path
