"""One optimizer step: rollout, teacher, student and loss, update; and what it measures.

Collectives of a step beside those of the models and the loss: one sum over the data-parallel
ranks of the token counts (none with one copy), and those of the engine. Everything that is logged
travels with the engine's.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocabtp.opsd.config import Config
from vocabtp.opsd.data import batch_indices
from vocabtp.opsd.engine import Engine, StepResult
from vocabtp.opsd.faults import TokenPlace, first_bad_row
from vocabtp.opsd.loss import ROW_METRICS, LossSpec, distill_loss
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.phases import Phases
from vocabtp.opsd.rollout import Rollout, generate
from vocabtp.opsd.session import Models, Prompts
from vocabtp.opsd.sharding import gathered

PHASES = ("rollout", "teacher", "student", "step", "other")

# what each data-parallel rank reports, in this order; all are sums, but for the last
_REPORT = (
    "loss",
    *ROW_METRICS,
    "tokens",
    "samples",
    "truncated",
    "empty",
    "length_max",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did, equal on all ranks but for the times."""

    result: StepResult
    metrics: dict[str, Any]
    signum: int  # a signal that some rank was sent, or 0
    peak_bytes: list[int]  # of each rank


@dataclass(slots=True)
class _Times:
    """Seconds by phase; a phase ends when the device has done its work."""

    device: torch.device
    phases: Phases
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.phases.enter("update" if name == "step" else name):
                yield
        finally:
            if self.device.type != "cpu":
                # the teacher's rows may still be on their way to the host
                torch.accelerator.current_stream(self.device).synchronize()
            self.seconds[name] += time.perf_counter() - start

    def close(self) -> float:
        total = time.perf_counter() - self.began
        self.seconds["other"] = max(0.0, total - sum(self.seconds.values()))
        return total


class Stepper:
    """Takes optimizer steps.

    Args:
        config: The run's configuration, batch sizes filled in.
        layout: The ranks.
        prompts: Training prompts.
        models: Student and teacher.
        engine: Holds gradients and optimizer.
        phases: Told what this rank is doing.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        prompts: Prompts,
        models: Models,
        engine: Engine,
        phases: Phases | None = None,
    ) -> None:
        self.config, self.layout, self.prompts = config, layout, prompts
        self.models, self.engine = models, engine
        self.phases = Phases() if phases is None else phases
        self.spec = LossSpec.of(config.distillation)
        self.bad_token = TokenPlace()
        # the answers of one prompt are rows of their own here: micro-batches cut anywhere
        self.rollout_config = config.rollout.model_copy(update={"n_samples_per_prompt": 1})

    def run(
        self,
        step: int,
        signum: Callable[[], int] = lambda: 0,
        tick: Callable[[int, int], None] = lambda done, total: None,
    ) -> StepReport:
        """Take optimizer step `step`, counted from 0; every rank calls it.

        Args:
            step: Says which prompts, which noise and which learning rate.
            signum: The signal that this rank was sent, or 0; asked when the step is nearly
                done, for all ranks to know.
            tick: Called on every rank before each rollout and each backward of a micro-batch,
                equally often; what it raises must be raised on all ranks.
        """
        times = _Times(self.layout.device, self.phases)
        self.phases.step = step + 1
        self.bad_token = TokenPlace()
        parts = self._parts(step)
        with times.phase("rollout"), gathered(self.models.student.module):
            batches = self._rollouts(step, parts, signum, tick)
        tokens, busy = self._count([rollout for _, rollout in batches], len(parts))
        last = max((i for i, copies in enumerate(busy) if copies), default=-1)
        loss = 0.0
        rows: list[Tensor] = []
        for i in range(len(parts)):
            tick(i, len(parts))
            # a copy with less to do has its empty parts last
            indices, rollout = batches[i] if i < len(batches) else ([], None)
            if rollout is not None and any(rollout.response_lengths):
                share = self._normalizer(rollout, tokens, sum(busy))
                loss += self._micro_batch(indices, rollout, share, rows, times, last=i == last)
            elif busy[i] and self.engine.lockstep:
                self._idle(times, last=i == last)
        with times.phase("step"):
            result = self.engine.step(
                step,
                tokens=tokens,
                report=self._report(loss, rows, [rollout for _, rollout in batches]),
                own=[signum(), _peak_bytes(self.layout.device), *self.bad_token.numbers()],
            )
        result = self._blame(result)
        wall = times.close()
        return StepReport(
            result=result,
            metrics=_metrics(step, result, times, wall),
            signum=int(result.ranks[:, 0].max()),
            peak_bytes=[int(n) for n in result.ranks[:, 1].tolist()],
        )

    def _parts(self, step: int) -> list[list[tuple[int, int]]]:
        """This copy's share of the step in micro-batches of (prompt index, sample id).

        As many on every copy: the last ones are empty where a short step leaves a copy less.
        """
        training = self.config.training
        samples = self.config.rollout.n_samples_per_prompt
        indices = batch_indices(
            step,
            training.train_batch_size or 1,
            len(self.prompts),
            training.seed,
            self.config.data.shuffle,
            epochs=None if training.max_steps > 0 else training.num_train_epochs,
        )
        # an id names a place in the step, so that a layout does not change what is sampled
        rows = [(i, p * samples + k) for p, i in enumerate(indices) for k in range(samples)]
        start = len(rows) * self.layout.dp_rank // self.layout.dp
        stop = len(rows) * (self.layout.dp_rank + 1) // self.layout.dp
        size = training.micro_batch_size_per_gpu or 1
        most = -(-len(rows) // self.layout.dp)
        return [rows[start + at : min(start + at + size, stop)] for at in range(0, most, size)]

    def _rollouts(
        self,
        step: int,
        parts: list[list[tuple[int, int]]],
        signum: Callable[[], int],
        tick: Callable[[int, int], None],
    ) -> list[tuple[list[int], Rollout]]:
        """Prompt indices and answers of each micro-batch."""
        out = []
        for n, part in enumerate(parts):
            tick(n, len(parts))
            if not part:
                continue
            chosen = [i for i, _ in part]
            rollout = generate(
                self.models.student,
                self.prompts.for_student(chosen),
                [sample for _, sample in part],
                config=self.rollout_config,
                specials=self.models.specials,
                seed=self.config.training.seed,
                step=step,
                # what is cut short here is thrown away: the next tick stops all ranks
                stop=lambda: signum() != 0,
            )
            out.append((chosen, rollout))
        return out

    def _count(self, rollouts: list[Rollout], parts: int) -> tuple[int, list[int]]:
        """Response tokens over all copies, and for each micro-batch the copies that have any."""
        lengths = [sum(rollout.response_lengths) for rollout in rollouts]
        lengths += [0] * (parts - len(lengths))
        counts = [sum(lengths), *(int(length > 0) for length in lengths)]
        if self.layout.dp > 1:
            total = torch.tensor(counts, dtype=torch.int64, device=self.layout.device)
            dist.all_reduce(total, group=self.layout.dp_group)
            counts = total.tolist()
        return counts[0], counts[1:]

    def _normalizer(self, rollout: Rollout, tokens: int, filled: int) -> float:
        if self.config.distillation.loss_scale == "micro_batch_mean":
            return float(sum(rollout.response_lengths) * filled)
        return float(tokens)

    def _micro_batch(
        self,
        indices: list[int],
        rollout: Rollout,
        normalizer: float,
        rows: list[Tensor],
        times: _Times,
        *,
        last: bool,
    ) -> float:
        """Add one micro-batch's gradient; its share of the loss. No teacher row outlives it."""
        seen = len(rows)
        with times.phase("teacher"):
            cache = self.models.teacher.score(rollout, self.prompts.for_teacher(indices))
        with cache, times.phase("student"):
            # behind the forward, as far as the cache's budget goes
            cache.prefetch(0, len(cache), chunk=self.spec.chunk_size)
            logits = self.models.student.response_logits(
                rollout.tokens, rollout.attention_mask, rollout.response_mask
            )
            loss = distill_loss(
                logits,
                cache,
                None,
                self.spec,
                self.models.student.shard,
                normalizer=normalizer,
                collect=rows,
                # the rollout made sure that tensor-parallel peers hold the same tokens
                agreed=True,
            )
            self.engine.backward(loss, last=last)
            value = float(loss.detach())
        if not math.isfinite(value) and not self.bad_token:
            found = first_bad_row(rows[seen:], rollout.response_lengths)
            if found is not None:
                row, token = found
                sample = rollout.sample_ids[row] % self.config.rollout.n_samples_per_prompt
                self.bad_token = TokenPlace(indices[row], sample, token)
        return value

    def _blame(self, result: StepResult) -> StepResult:
        """The result of a step without a finite loss, its reason telling the first bad row."""
        place = TokenPlace.of_ranks(result.ranks[:, 2:5])
        if result.applied or not place:
            return result
        line = self.prompts.examples[place.prompt].line
        where = f"{self.prompts.path}:{line}, sample {place.sample}, response token {place.token}"
        return replace(result, reason=f"{result.reason}: first at {where}")

    def _idle(self, times: _Times, *, last: bool) -> None:
        """Take part in the collectives of a micro-batch that only other copies have rows in."""
        with times.phase("teacher"):
            self.models.teacher.idle()
        with times.phase("student"):
            # of no element: 0, and so are its gradients
            self.engine.backward(self.models.student.idle_logits().sum(), last=last)

    def _report(self, loss: float, rows: list[Tensor], rollouts: list[Rollout]) -> list[float]:
        sums = [0.0] * len(ROW_METRICS)
        if rows:
            sums = torch.cat(rows, dim=1).double().sum(dim=1).tolist()
        lengths = [length for rollout in rollouts for length in rollout.response_lengths]
        return [
            loss,
            *sums,
            sum(lengths),
            len(lengths),
            sum(sum(rollout.truncated) for rollout in rollouts),
            lengths.count(0),
            max(lengths, default=0),
        ]


def _metrics(step: int, result: StepResult, times: _Times, wall: float) -> dict[str, Any]:
    """The line of metrics.jsonl; `step` counts from 1 there."""
    total = dict(zip(_REPORT, result.reports.sum(dim=0).tolist(), strict=True))
    longest = float(result.reports[:, -1].max())
    tokens, samples = max(1.0, total["tokens"]), max(1.0, total["samples"])
    return {
        "step": step + 1,
        "loss": total["loss"],
        **{name: total[name] / tokens for name in ROW_METRICS},
        "response_tokens": int(total["tokens"]),
        "response_length": total["tokens"] / samples,
        "response_length_max": int(longest),
        "truncated": total["truncated"] / samples,
        "empty_responses": int(total["empty"]),
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "applied": result.applied,
        **({} if result.applied else {"skipped_because": result.reason}),
        "tokens_per_s": total["tokens"] / wall,
        "seconds": wall,
        **{f"seconds_{name}": value for name, value in times.seconds.items()},
    }


def _peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: of its device, or resident memory on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kilobytes, but bytes on macOS
    return peak if sys.platform == "darwin" else peak * 1024
