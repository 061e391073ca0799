"""Gradients and optimizer state inside DeepSpeed's optimizers, by parameter.

DeepSpeed keeps them in three ways. ZeRO-0 in fp32 has the plain optimizer over the parameters;
ZeRO-0 in bf16 has it over fp32 copies; ZeRO-1 and 2 have it over one flat fp32 tensor a parameter
group, of which each data-parallel rank holds a part. Here all three are read and written as whole
tensors, of what this rank's tensor-parallel part of a parameter is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocabtp.opsd.engine.optimizers import STATE
from vocabtp.opsd.parallel import Layout


class Holder(Protocol):
    """Where one of DeepSpeed's optimizers keeps things."""

    def grads(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """What this rank has of the reduced gradients, before the step, to read or change."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the coming step."""

    def drop_grads(self) -> None:
        """Forget all gradients, as if there had been no backward."""

    def keys(self, parameter: nn.Parameter) -> list[str]:
        """Entries of the parameter's state, equal on all ranks."""

    def read(self, parameter: nn.Parameter, key: str) -> Tensor:
        """An entry in fp32; every data-parallel rank calls it."""

    def write(self, parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
        """Set the parameter's state; without a `master` it is the parameter itself."""


class Whole:
    """ZeRO-0: a leaf for each parameter, that parameter or its fp32 copy."""

    def __init__(self, optimizer: Any) -> None:
        self.wrapper = optimizer if hasattr(optimizer, "fp32_groups") else None
        self.base: torch.optim.Optimizer = optimizer
        self.leaves: dict[nn.Parameter, Tensor] = {
            p: p for group in optimizer.param_groups for p in group["params"]
        }
        if self.wrapper is not None:
            self.base = self.wrapper.optimizer
            self.leaves = {
                p: copy
                for halves, copies in zip(
                    self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True
                )
                for p, copy in zip(halves, copies, strict=True)
            }
            # a step of zeros was taken to make the state, and Adam counted it
            self.base.state.clear()

    def grads(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of each parameter that has one; the same on all data-parallel ranks."""
        for parameter in self.leaves:
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def scale(self, factor: float) -> None:
        """In fp32 also where gradients are bf16: they are divided by the loss scale in fp32."""
        if self.wrapper is not None:
            self.wrapper.loss_scale = 1 / factor
        elif factor != 1:
            torch._foreach_mul_([grad for _, grad in self.grads()], factor)

    def drop_grads(self) -> None:
        """Forget all gradients."""
        for parameter in self.leaves:
            parameter.grad = None

    def keys(self, parameter: nn.Parameter) -> list[str]:
        """Entries of the parameter's state."""
        leaf = self.leaves[parameter]
        master = [] if leaf is parameter else ["master"]
        return master + [key for key in STATE if key in self.base.state.get(leaf, {})]

    def read(self, parameter: nn.Parameter, key: str) -> Tensor:
        """An entry, without a copy."""
        leaf = self.leaves[parameter]
        value: Tensor = leaf if key == "master" else self.base.state[leaf][key]
        return value.detach()

    def write(self, parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
        """Set the parameter's state."""
        leaf = self.leaves[parameter]
        with torch.no_grad():
            leaf.copy_(values.get("master", parameter))
        self.base.state.pop(leaf, None)
        state = {key: values[key] for key in STATE if key in values}
        if state:
            self.base.state[leaf] = {
                key: value.clone() if key == "step" else value.to(leaf.device, copy=True)
                for key, value in state.items()
            }


class Flat:
    """ZeRO-1 and 2: this rank's part of one flat tensor a group."""

    def __init__(self, optimizer: Any, layout: Layout) -> None:
        self.zero, self.layout = optimizer, layout
        self.base: torch.optim.Optimizer = optimizer.optimizer
        self.flats: dict[nn.Parameter, Tensor] = {
            p: flat
            for group, flat in zip(
                optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
            )
            for p in group
        }

    def grads(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """This rank's parts of gradients; other data-parallel ranks have the others."""
        for i, parameters in enumerate(self.zero.params_in_partition):
            parts = [
                part
                for part in self.zero.averaged_gradients.get(i) or ()
                if not getattr(part, "_zero_padding", False)
            ]
            yield from zip(parameters, parts, strict=False)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1 and (parts := [part for _, part in self.grads()]):
            torch._foreach_mul_(parts, factor)

    def drop_grads(self) -> None:
        """Forget all gradients, as DeepSpeed does after an overflow."""
        self.zero.zero_grad(set_to_none=True)
        for key in list(self.zero.averaged_gradients):
            self.zero.averaged_gradients[key] = None
        for key in list(self.zero.all_grad_tensors):
            self.zero.all_grad_tensors[key] = None
        self.zero.micro_step_id = -1

    def keys(self, parameter: nn.Parameter) -> list[str]:
        """Entries of the parameter's state: those of its group."""
        master = [] if parameter.dtype == torch.float32 else ["master"]
        return master + [k for k in STATE if k in self.base.state.get(self.flats[parameter], {})]

    def read(self, parameter: nn.Parameter, key: str) -> Tensor:
        """An entry, put together from the parts of all data-parallel ranks."""
        if key == "step":
            step: Tensor = self.base.state[self.flats[parameter]]["step"]
            return step
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if (parts := self._parts(parameter, key, whole)) is not None:
            parts[1].copy_(parts[0])
        if self.layout.dp > 1:
            dist.all_reduce(whole, group=self.layout.dp_group)
        return whole.view(parameter.shape)

    def write(self, parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
        """Take this rank's part of the parameter's state."""
        flat = self.flats[parameter]
        own = {"master": values.get("master", parameter.detach())} | values
        for key in ("master", *STATE):
            if key not in own:
                continue
            value = own[key]
            if key == "step":
                self.base.state[flat]["step"] = value.clone()
                continue
            if key != "master" and key not in self.base.state[flat]:
                self.base.state[flat][key] = torch.zeros_like(flat.detach())
            whole = value.to(flat.device, torch.float32).reshape(-1)
            if (parts := self._parts(parameter, key, whole)) is not None:
                parts[0].copy_(parts[1])

    def _parts(
        self, parameter: nn.Parameter, key: str, whole: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The same elements in this rank's flat tensor and in the whole; None if it has none."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.flats[parameter]
        store = flat.detach() if key == "master" else self.base.state[flat][key]
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return store.narrow(0, here.start, here.numel), whole.narrow(0, there.start, there.numel)


def holder_of(optimizer: Any, layout: Layout) -> Holder:
    """The holder for an optimizer that DeepSpeed made."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return Flat(optimizer, layout)
    return Whole(optimizer)
