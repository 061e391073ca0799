"""Parameters over the data-parallel ranks (FSDP2), on top of tensor parallelism.

Each decoder layer is one unit, and what is left of the model (embedding, head, last norm) another.
At rest a rank stores its part of every parameter, and optimizer and gradients know only that part.
A unit's parameters are gathered for its forward; zero3 drops them after it and gathers them again
for the backward, zero2 keeps them until the backward is done.

A student that computes in bf16 is stored in fp32: the stored part is the master that the optimizer
moves, and a forward sees its bf16 rounding, as it does without sharding. Gradients are summed in
fp32. A frozen model is stored as it computes.

What the model library keeps in fp32 within a model of bf16 or fp16 (routers of experts, sinks of
attention: few numbers) is not sharded: every rank holds it whole, computes with it as it is, and
the engine adds its gradients up.

Every gathering is a collective over the data-parallel ranks: they all have to run equally many
forwards and backwards, also those without a row to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.layers import decoder_layers
from vocabtp.opsd.model_files import kept_in_float32

_HALF = (torch.bfloat16, torch.float16)
_KEY = "vocabtp_sharding"


@dataclass(slots=True, kw_only=True)
class Sharding:
    """What is special about a module whose parameters are sharded over data-parallel ranks.

    Attributes:
        dtype: That the module computes in.
        free: Whether a layer's parameters are dropped between its forward and its backward.
        whole: Names of the parameters that every rank holds whole, in fp32.
        held: Whether all parameters are whole now, until `gathered` ends.
    """

    dtype: torch.dtype
    free: bool
    whole: frozenset[str] = frozenset()
    held: bool = False


def sharding_of(module: nn.Module) -> Sharding | None:
    """How this module is sharded over data-parallel ranks; None if it is not."""
    found: Sharding | None = getattr(module, _KEY, None)
    return found


def shard_module(
    module: Any,
    mesh: DeviceMesh,
    *,
    free: bool,
    name: str,
    fill: Callable[[nn.Module], None] | None = None,
    offload: bool = False,
) -> None:
    """Leave each rank its part of every parameter, on the device of the mesh.

    Args:
        module: A Hugging Face causal LM, cut over tensor-parallel ranks already if it is to be.
        mesh: The one-dimensional mesh of the data-parallel ranks, two or more.
        free: zero3; otherwise zero2.
        name: What errors call the model.
        fill: Gives a unit this rank's parts of its weights, if the module is on the meta device;
            called when it is known what they are, so that no weight is ever whole.
        offload: Keep the parts in host memory. A unit's part is copied to the device when the unit
            is gathered.

    Raises:
        ModelError: Its parameters are of more than one dtype, and not because its class keeps
            some of them in fp32.
    """
    whole = _kept(module)
    parameters = [p for key, p in module.named_parameters() if key not in whole]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(dtypes) > 1:
        raise ModelError(
            f"{name}: its weights are of several dtypes ({', '.join(dtypes)}), which cannot be "
            "sharded together: set parallel.shard to none"
        )
    dtype = parameters[0].dtype
    widen = dtype in _HALF and any(p.requires_grad for p in parameters)
    _move(whole.values(), module, torch.device(mesh.device_type))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if widen else None,
        reduce_dtype=torch.float32,
        # activations are left to the model, as without sharding
        cast_forward_inputs=False,
    )
    # nothing to pin, where the device is the host
    away = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for unit in [*decoder_layers(module), module]:
        if widen:
            _widen(unit)
        # the root's parameters serve the end of the forward and the start of the backward
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=free and unit is not module,
            mp_policy=policy,
            offload_policy=away,
            ignored_params={p for key, p in module.named_parameters() if key in whole},
        )
        if fill is not None:
            fill(unit)
            # loads nothing, but after a load FSDP takes its parameters anew, and pads them
            unit.load_state_dict({}, strict=False)
    for unit in _units(module):
        # a sum: losses are divided by the tokens of all ranks. gloo knows no scaled reduction
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    setattr(module, _KEY, Sharding(dtype=dtype, free=free, whole=frozenset(whole)))


def mark_sharded(module: nn.Module, dtype: torch.dtype) -> None:
    """Say of a frozen module that somebody else has sharded it and gathers it in its forward."""
    setattr(module, _KEY, Sharding(dtype=dtype, free=True))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold all parameters whole for a block, so that forwards in it need no other copy.

    Data-parallel ranks may run differently many forwards in it, also none. All of them enter it.
    Nothing to do for a module that is not sharded, or that is held whole already.
    """
    sharding = sharding_of(module)
    if sharding is None or sharding.held:
        yield
        return
    sharding.held = True
    units = _units(module)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        sharding.held = False
        for i, unit in enumerate(units):
            unit.set_reshard_after_forward(sharding.free and i > 0, recurse=False)
            unit.reshard()


def release(module: nn.Module) -> None:
    """Drop whole parameters that a forward without a backward has left; sends nothing."""
    sharding = sharding_of(module)
    if sharding is not None and not sharding.held:
        for unit in _units(module):
            unit.reshard()


def announce_backward(module: nn.Module, *, last: bool) -> None:
    """Say whether the next backward is the step's last one, which alone reduces gradients."""
    sharding = sharding_of(module)
    if sharding is None:
        return
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last)
    module.set_is_last_backward(last)
    # zero2 gathers once a step for all of its forwards and backwards
    module.set_reshard_after_backward(last or sharding.free)


def _units(module: nn.Module) -> list[FSDPModule]:
    """The root, then the layers."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _kept(module: Any) -> dict[str, nn.Parameter]:
    """The parameters that the model's class keeps in fp32, where the rest is not."""
    # what it was loaded in, not what some of its weights are: those are not to pass for the rest
    dtype = module.config.dtype
    if dtype not in _HALF:
        return {}
    named = dict(module.named_parameters())
    kept = kept_in_float32(module, dtype)
    return {key: named[key] for key in kept if named[key].dtype == torch.float32}


def _move(parameters: Iterable[nn.Parameter], module: nn.Module, device: torch.device) -> None:
    """Put parameters on the device, the tied ones once and still tied."""
    moved = {p: nn.Parameter(p.detach().to(device), p.requires_grad) for p in parameters}
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in moved:
                part.register_parameter(key, moved[parameter])


def _widen(module: nn.Module) -> None:
    """Make parameters fp32, the tied ones once and still tied; buffers stay as they are."""
    wide: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.dtype not in _HALF:
                continue
            if parameter not in wide:
                wide[parameter] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            part.register_parameter(key, wide[parameter])
