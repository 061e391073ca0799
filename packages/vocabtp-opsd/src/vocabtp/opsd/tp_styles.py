"""How a module computes when its weights are cut over the tensor-parallel ranks.

Cut weights are DTensors, so that checkpoints, norms and optimizers know what a rank holds. Inside
a module's own forward they appear as this rank's plain part, and activations are plain tensors:
DTensor dispatch would cost more than the arithmetic in a decode loop, and takes parts of unequal
size for equal ones between two modules. Gradients come out cut as the weights are.

Letters: `in`, `out` features of a linear layer; `V` rows of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from vocabtp.dist import VocabShard

Args = tuple[Any, ...]


class CutColumns(ParallelStyle):
    """A linear layer that holds some of its outputs: `[..., in]` whole -> `[..., out / ranks]`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, "weight", device_mesh, 0)
        _cut(module, "bias", device_mesh, 0)
        group = device_mesh.get_group()
        return _around(module, _local, lambda args: (_sum_backward(args[0], group), *args[1:]))


class CutRows(ParallelStyle):
    """A linear layer that holds some of its inputs: `[..., in / ranks]` -> `[..., out]` whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, "weight", device_mesh, 1)
        group = device_mesh.get_group()

        def add(output: Tensor, own: dict[str, Any]) -> Tensor:
            total: Tensor = _sum_forward(output, group)
            bias = own["bias"]
            # once, after the sum, and not on every rank before it
            return total if bias is None else total + bias

        def view(key: str, parameter: Tensor) -> Tensor | None:
            return None if key == "bias" else _local(key, parameter)

        return _around(module, view, after=add)


class CutVocabulary(ParallelStyle):
    """An embedding that holds some of its rows: looks up its own and sums over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _cut(module, "weight", device_mesh, 0)
        group = device_mesh.get_group()
        assert isinstance(module.weight, DTensor)
        shard = VocabShard.resolve(module.weight.to_local().shape[0], group)
        padding = module.padding_idx
        if padding is not None:
            # the row without gradient, by its place on this rank
            mine = shard.start <= padding < shard.end
            module.padding_idx = padding - shard.start if mine else None
        foreign: list[Tensor] = []

        def before(args: Args) -> Args:
            ids = args[0]
            _check_ids(ids, shard.global_size)
            other = (ids < shard.start) | (ids >= shard.end)
            foreign.append(other)
            return ((ids - shard.start).masked_fill(other, 0), *args[1:])

        def after(output: Tensor, _own: dict[str, Any]) -> Tensor:
            found = output.masked_fill(foreign.pop().unsqueeze(-1), 0)
            total: Tensor = _sum_forward(found, group)
            return total

        return _around(module, _local, before, after)


class SumGradient(ParallelStyle):
    """A module that every rank holds whole, but applies to its own heads: gradients are summed.

    The sum is part of the backward. A hook on the parameter's gradient would be wrong where
    micro-batches accumulate: it would sum again what was summed before.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        return _around(
            module,
            # a frozen one as it is: it may be gathered only after this
            lambda _key, p: _sum_backward(p, group) if p.requires_grad else p,
        )


def _cut(module: nn.Module, key: str, mesh: DeviceMesh, dim: int) -> None:
    whole = module._parameters[key]
    if whole is not None:
        part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(part, whole.requires_grad))


def _local(_key: str, parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _check_ids(ids: Tensor, size: int) -> None:
    # on an accelerator this would cost a synchronisation; there such an id looks up zeros
    if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < size:
        raise IndexError(f"a token id is not in [0, {size}): got {ids.min()} to {ids.max()}")


def _around(
    module: nn.Module,
    view: Callable[[str, Tensor], Tensor | None],
    before: Callable[[Args], Args] | None = None,
    after: Callable[[Tensor, dict[str, Any]], Tensor] | None = None,
) -> nn.Module:
    """Let the module's forward see `view(parameter)`, and change its arguments and its output."""
    calls: list[dict[str, Any]] = []

    def enter(_module: nn.Module, args: Args) -> Args | None:
        if before is not None:
            args = before(args)
        held = module._parameters
        # per call: others, such as FSDP, put parameters of their own in place of these
        # past a dict of DeepSpeed's, which would gather what is asked for and keep it
        own: dict[str, Any] = {key: dict.__getitem__(held, key) for key in held}
        calls.append(own)
        # the dict, not setattr: a module refuses a plain tensor as its parameter
        module._parameters.update(
            {key: None if p is None else view(key, p) for key, p in own.items()}  # type: ignore[misc]
        )
        return args

    def leave(_module: nn.Module, _args: Args, output: Tensor | None) -> Tensor | None:
        if not calls:
            return None  # `before` raised
        own = calls.pop()
        module._parameters.update(own)
        return output if output is None or after is None else after(output, own)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
    return module


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# torch does not annotate apply
_sum_backward: Any = _SumBackward.apply
_sum_forward: Any = _SumForward.apply
