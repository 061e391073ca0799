"""AdamW or SGD in plain PyTorch, tensor parallel and data parallel.

The optimizer never sees a DTensor. Each parameter has one *slot*: a plain leaf tensor that is the
parameter's local storage itself, or an fp32 master copy of it when the parameter is bf16 or fp16.
Optimizers here are element-wise, so local shards and replicas update exactly as the dense
parameter would, fused and foreach kernels work, and the step costs no DTensor dispatch.

Parameters may be sharded over the data-parallel ranks (vocabtp.opsd.sharding). A slot is then a
part of an fp32 parameter, and gradients come out of the last backward reduced; those of the few
parameters that stay whole are reduced here, as without sharding.

Collectives of a step, with P the parameters: one all_reduce over the data-parallel group a bucket
of P's gradients (none with dp = 1 or sharded parameters), and one all_gather of a few numbers over
the world, from which every rank computes the same norm and the same decision in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocabtp.opsd.config import TrainingConfig
from vocabtp.opsd.engine.base import StepResult
from vocabtp.opsd.engine.optimizers import STATE, make_optimizer
from vocabtp.opsd.engine.outcome import BAD_NORM, first_bad, gather, refusal
from vocabtp.opsd.engine.schedule import Schedule
from vocabtp.opsd.engine.slots import buckets, local_grad, local_part, make_slot, placed
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.sharding import announce_backward, release, sharding_of


class TorchEngine:
    """The engine over plain PyTorch optimizers.

    Args:
        module: The student; parameters may be DTensors on the dimensions `dp` and `tp`.
        config: The `training` section.
        layout: The ranks.
        total_steps: Optimizer steps of the whole run, for the schedule.
    """

    def __init__(
        self, module: nn.Module, config: TrainingConfig, layout: Layout, total_steps: int
    ) -> None:
        self.layout, self.module = layout, module
        self.max_grad_norm = config.max_grad_norm or 0.0
        self.schedule = Schedule(
            kind=config.lr_scheduler,
            peak=config.learning_rate,
            warmup=config.warmup_steps,
            total=total_steps,
        )
        # named_parameters names a tied weight once: one slot, one optimizer state
        self.slots = [
            make_slot(name, param)
            for name, param in module.named_parameters()
            if param.requires_grad
        ]
        self.optimizer = make_optimizer(
            [slot.leaf for slot in self.slots], config, rate=config.learning_rate
        )
        self.sharding = sharding_of(module)
        self.lockstep = layout.sharded
        # parameters that are their own masters are saved as masters too: any layout can read them
        self._own_masters = self.sharding is not None and self.sharding.dtype != torch.float32

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add this micro-batch's gradient, in fp32 for parameters with a master copy.

        Args:
            loss: This rank's share of the loss.
            last: Whether it is the step's last backward, for all data-parallel ranks alike. Sharded
                gradients are reduced in it, once a step.
        """
        announce_backward(self.module, last=last)
        torch.autograd.backward(loss)
        for slot in self.slots:
            if slot.master and slot.param.grad is not None:
                grad = local_grad(slot.param).float()
                slot.leaf.grad = grad if slot.leaf.grad is None else slot.leaf.grad.add_(grad)
                slot.param.grad = None

    def step(
        self, index: int, *, tokens: int, report: Sequence[float], own: Sequence[float]
    ) -> StepResult:
        """Reduce, agree, clip and step; or skip on all ranks alike.

        Args:
            index: The optimizer step, from 0.
            tokens: Response tokens of the step over all ranks, the same number on every rank.
            report: Numbers of this data-parallel rank, equal on its tensor-parallel peers; the
                first one is its share of the loss.
            own: Numbers of this very rank.

        Returns:
            The outcome, equal on all ranks. The step is skipped when it has no response token or
            when its loss or gradient norm is not finite.
        """
        release(self.module)
        for slot in self.slots:
            if not slot.master and slot.param.grad is not None:
                slot.leaf.grad = local_grad(slot.param)
        if tokens:
            self._reduce()
        squares = self._squares()
        gathered = gather(self.layout, [*squares, *report, *own])
        norm, reports = self._agree(gathered, len(report))
        rate = self.schedule(index)
        reason = refusal(tokens, norm, reports[:, 0])
        if reason == BAD_NORM:
            reason += self._first_bad_gradient()
        if not reason:
            self._apply(norm, rate)
        self.zero_grad()
        return StepResult(
            applied=not reason,
            reason=reason,
            grad_norm=norm if tokens else math.nan,
            learning_rate=rate,
            reports=reports,
            ranks=gathered[:, len(squares) + len(report) :],
        )

    def zero_grad(self) -> None:
        """Drop what was accumulated; what sharded parameters have not reduced yet stays."""
        release(self.module)
        for slot in self.slots:
            slot.param.grad = slot.leaf.grad = None

    def _apply(self, norm: float, rate: float) -> None:
        if self.max_grad_norm and norm > self.max_grad_norm:
            grads = [slot.leaf.grad for slot in self.slots if slot.leaf.grad is not None]
            torch._foreach_mul_(grads, self.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            for slot in self.slots:
                if slot.master:
                    local_part(slot.param).copy_(slot.leaf)

    def _reduce(self) -> None:
        """Add gradients up over the data-parallel ranks.

        A rank without response tokens has no gradients and adds zeros. A parameter that no rank
        has a gradient for keeps none, so that weight decay does not move it.
        """
        slots = self.slots
        if self.sharding is not None:
            slots = [slot for slot in slots if slot.name in self.sharding.whole]
        if self.layout.dp == 1 or not slots:
            return
        has = [slot.leaf.grad is not None for slot in slots]
        counts = torch.tensor(has, dtype=torch.float32, device=self.layout.device)
        for bucket in buckets(slots):
            grads = [
                torch.zeros_like(slots[i].leaf) if (grad := slots[i].leaf.grad) is None else grad
                for i in bucket
            ]
            # the flags ride along with the last bucket
            flags = [counts.to(grads[0].dtype)] if bucket[-1] == len(slots) - 1 else []
            flat = torch.cat([g.reshape(-1) for g in grads] + flags)
            dist.all_reduce(flat, group=self.layout.dp_group)
            start = 0
            for i in bucket:
                leaf = slots[i].leaf
                leaf.grad = flat[start : start + leaf.numel()].view_as(leaf)
                start += leaf.numel()
            if flags:
                counts = flat[-len(slots) :]
        for slot, count in zip(slots, counts.tolist(), strict=True):
            if not count:
                slot.leaf.grad = None

    def _squares(self) -> list[float]:
        """Sums of squares of this rank's gradients, by how parameters are cut: see `_CUTS`."""
        sums = []
        for cut in _CUTS:
            grads = [
                slot.leaf.grad
                for slot in self.slots
                if slot.leaf.grad is not None
                and slot.leaf.numel()
                and (slot.cut_over("dp"), slot.cut_over("tp")) == cut
            ]
            norms = list(torch._foreach_norm(grads)) if grads else []
            sums.append(
                torch.stack(norms).double().square().sum()
                if norms
                else torch.zeros((), dtype=torch.float64, device=self.layout.device)
            )
        squares: list[float] = torch.stack(sums).tolist()
        return squares

    def _agree(self, gathered: Tensor, width: int) -> tuple[float, Tensor]:
        """The gradient norm and one report for each data-parallel rank."""
        by_rank = gathered.view(self.layout.dp, self.layout.tp, -1)
        # reduced gradients are the same wherever a parameter is not cut: rank 0 of that dimension
        square = sum(
            float(by_rank[: None if over_dp else 1, : None if over_tp else 1, i].sum())
            for i, (over_dp, over_tp) in enumerate(_CUTS)
        )
        # a replica that saw something else than replica 0 must not go on as if it had not
        finite = bool(torch.isfinite(gathered[:, : len(_CUTS)]).all())
        norm = math.sqrt(square) if finite and square >= 0 else math.nan
        return norm, by_rank[:, 0, len(_CUTS) : len(_CUTS) + width]

    def _first_bad_gradient(self) -> str:
        """Which parameter's gradient is the first that is not finite on any rank, as a clause.

        One more exchange, on all ranks, in a step that is skipped.
        """
        names = [slot.name for slot in self.slots]
        grads = [(i, g) for i, slot in enumerate(self.slots) if (g := slot.leaf.grad) is not None]
        # by norm: one that overflows spoils the step as well
        bad = [i for i, g in grads if g.numel() and not math.isfinite(float(g.norm()))]
        return first_bad(self.layout, names, bad)

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state by `optimizer.<parameter>.<entry>`, placed as the parameter is."""
        out: dict[str, Tensor] = {}
        for slot in self.slots:
            if slot.master or self._own_masters:
                out[f"optimizer.{slot.name}.master"] = placed(slot.param, slot.leaf)
            for key, value in self.optimizer.state.get(slot.leaf, {}).items():
                if isinstance(value, Tensor):
                    out[f"optimizer.{slot.name}.{key}"] = placed(slot.param, value)
        return out

    def empty_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors to read the saved entries `names` into."""
        out: dict[str, Tensor] = {}
        wanted = set(names)
        for slot in self.slots:
            for key in ("master", *STATE):
                if (name := f"optimizer.{slot.name}.{key}") in wanted:
                    empty = (
                        torch.zeros((), dtype=torch.float32)
                        if key == "step"
                        else torch.zeros_like(slot.leaf.detach())
                    )
                    out[name] = placed(slot.param, empty)
        return out

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved entries; a parameter without any has never been stepped."""
        for slot in self.slots:
            found = {
                key: local_part(state[name])
                for key in ("master", *STATE)
                if (name := f"optimizer.{slot.name}.{key}") in state
            }
            master = found.pop("master", None)
            with torch.no_grad():
                if master is not None:
                    slot.leaf.copy_(master)
                elif slot.master:
                    slot.leaf.copy_(local_part(slot.param).float())
            self.optimizer.state.pop(slot.leaf, None)
            if found:
                self.optimizer.state[slot.leaf] = found


# whether cut over data-parallel ranks, and over tensor-parallel ranks
_CUTS = ((False, False), (False, True), (True, False), (True, True))
