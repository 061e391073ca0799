"""The engine over DeepSpeed: its ZeRO optimizers over models that are cut already.

They are cut when they are loaded, as with the torch engine or by DeepSpeed's AutoTP
(`vocabtp.opsd.engine.autotp`), and DeepSpeed is told the ranks as a model-parallel program tells
it. Checkpoints are those of the torch engine: either reads what the other wrote, at any layout.

DeepSpeed averages gradients over the data-parallel ranks and, unless told not to, divides losses
by the accumulation steps. A loss comes here divided by the tokens of the whole step, so it is
multiplied by the data-parallel ranks, and the division is turned off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vocabtp.opsd.config import Config
from vocabtp.opsd.engine.base import StepResult
from vocabtp.opsd.engine.deepspeed_json import complete, stage_of, values_named
from vocabtp.opsd.engine.deepspeed_start import check_installed, ranks_of, start
from vocabtp.opsd.engine.deepspeed_state import holder_of
from vocabtp.opsd.engine.optimizers import STATE, make_optimizer
from vocabtp.opsd.engine.outcome import BAD_NORM, first_bad, gather, refusal
from vocabtp.opsd.engine.places import make_plain, place_of, unwrapped, wrapped
from vocabtp.opsd.engine.schedule import Schedule
from vocabtp.opsd.parallel import Layout


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter in training."""

    name: str
    param: nn.Parameter


def check(config: Config, layout: Layout) -> None:
    """Find what would stop an engine from being made, without a model; no collectives.

    Raises:
        ConfigError: DeepSpeed is not installed, or its configuration cannot be used.
    """
    check_installed()
    complete(config, layout)


class DeepSpeedEngine:
    """The engine over DeepSpeed.

    Args:
        module: The student, cut over the tensor-parallel ranks and whole on each data-parallel
            copy; its parameters become plain tensors.
        config: The run's configuration, batch sizes filled in.
        layout: The ranks.
        total_steps: Optimizer steps of the whole run, for the schedule.

    Raises:
        ConfigError: DeepSpeed is not installed, or its configuration cannot be used.
    """

    def __init__(self, module: nn.Module, config: Config, layout: Layout, total_steps: int) -> None:
        training = config.training
        self.layout, self.module = layout, module
        self.max_grad_norm = training.max_grad_norm or 0.0
        self.schedule = Schedule(
            kind=training.lr_scheduler,
            peak=training.learning_rate,
            warmup=training.warmup_steps,
            total=total_steps,
        )
        # DeepSpeed reduces in a backward, on all copies at once
        self.lockstep = layout.dp > 1
        self.partitioned = stage_of(config) > 0
        settings = complete(config, layout)
        deepspeed = start(layout)
        make_plain(module)
        self.slots = [Trained(n, p) for n, p in module.named_parameters() if p.requires_grad]
        # rate 0: what DeepSpeed may step before the first gradient moves nothing
        optimizer = make_optimizer([slot.param for slot in self.slots], training, rate=0.0)
        with values_named():
            self.inner, self.optimizer, _, _ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=settings, mpu=ranks_of(layout)
            )
        self.holder = holder_of(self.optimizer, layout)

    @property
    def forward(self) -> Callable[..., Any]:
        """The student's forward where a backward is to follow."""
        found: Callable[..., Any] = self.inner
        return found

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add this micro-batch's gradient; the last one of a step reduces what is not yet."""
        self.inner.set_gradient_accumulation_boundary(last)
        self.inner.backward(loss, scale_wrt_gas=False)

    def step(
        self, index: int, *, tokens: int, report: Sequence[float], own: Sequence[float]
    ) -> StepResult:
        """Agree, clip and step; or skip on all ranks alike.

        Args:
            index: The optimizer step, from 0.
            tokens: Response tokens of the step over all ranks, the same number on every rank.
            report: Numbers of this data-parallel rank, equal on its tensor-parallel peers; the
                first one is its share of the loss.
            own: Numbers of this very rank.

        Returns:
            The outcome, equal on all ranks. The step is skipped when it has no response token,
            when its loss or gradient norm is not finite, or when DeepSpeed says that it did.
        """
        squares = self._squares()
        gathered = gather(self.layout, [*squares, *report, *own])
        norm, reports = self._agree(gathered, len(report))
        rate = self.schedule(index)
        reason = refusal(tokens, norm, reports[:, 0])
        if reason == BAD_NORM:
            reason += self._first_bad_gradient()
        if reason:
            self.zero_grad()
        elif not self._apply(norm, rate):
            reason = "DeepSpeed skipped it"
        return StepResult(
            applied=not reason,
            reason=reason,
            grad_norm=norm if tokens else math.nan,
            learning_rate=rate,
            reports=reports,
            ranks=gathered[:, len(squares) + len(report) :],
        )

    def zero_grad(self) -> None:
        """Drop what was accumulated since the last step."""
        self.holder.drop_grads()

    def _apply(self, norm: float, rate: float) -> bool:
        clip = self.max_grad_norm
        self.holder.scale(clip / norm if clip and norm > clip else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.inner.step()
        return bool(self.inner.was_step_applied())

    def _squares(self) -> list[float]:
        """Sums of squares of this rank's gradients: of whole parameters and of cut ones."""
        device = self.layout.device
        sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(2)]
        for param, grad in self.holder.grads():
            sums[place_of(param) is not None] += grad.float().norm().double().square()
        squares: list[float] = torch.stack(sums).tolist()
        return squares

    def _agree(self, gathered: Tensor, width: int) -> tuple[float, Tensor]:
        """The gradient norm and one report for each data-parallel rank."""
        by_rank = gathered.view(self.layout.dp, self.layout.tp, -1)
        # partitioned gradients are another part on every copy, reduced ones the same
        copies = by_rank if self.partitioned else by_rank[:1]
        square = float(copies[:, 0, 0].sum() + copies[:, :, 1].sum())
        finite = bool(torch.isfinite(gathered[:, :2]).all())
        norm = math.sqrt(square) if finite else math.nan
        return norm, by_rank[:, 0, 2 : 2 + width]

    def _first_bad_gradient(self) -> str:
        places = {slot.param: i for i, slot in enumerate(self.slots)}
        bad = sorted(
            places[param]
            for param, grad in self.holder.grads()
            if not math.isfinite(float(grad.float().norm()))
        )
        return first_bad(self.layout, [slot.name for slot in self.slots], bad)

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state by `optimizer.<parameter>.<entry>`, on the host.

        Every rank takes part. One copy's ranks keep a parameter's entries, a different copy for
        each of as many parameters as there are copies, so that no host holds all of them.
        """
        out: dict[str, Tensor] = {}
        for i, slot in enumerate(self.slots):
            for key in self.holder.keys(slot.param):
                value = self.holder.read(slot.param, key)
                if i % self.layout.dp == self.layout.dp_rank:
                    if key != "step":
                        value = wrapped(slot.param, value.detach())
                    out[f"optimizer.{slot.name}.{key}"] = value.to("cpu", copy=True)
        return out

    def empty_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors on the host to read the saved entries `names` into."""
        out: dict[str, Tensor] = {}
        wanted = set(names)
        for slot in self.slots:
            for key in ("master", *STATE):
                if (name := f"optimizer.{slot.name}.{key}") not in wanted:
                    continue
                out[name] = torch.zeros(())
                if key != "step":
                    # made on the device: a DTensor of a host tensor would move it there
                    empty = torch.zeros_like(slot.param.detach(), dtype=torch.float32)
                    out[name] = wrapped(slot.param, empty).to("cpu")
        return out

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved entries, after the parameters have got their values."""
        for slot in self.slots:
            found = {
                key: unwrapped(slot.param, value)
                for key in ("master", *STATE)
                if (value := state.get(f"optimizer.{slot.name}.{key}")) is not None
            }
            self.holder.write(slot.param, found)
