"""Parameters as the optimizer sees them: plain local tensors, one for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 16 * 1024 * 1024


@dataclass(slots=True)
class Slot:
    """One parameter, and the plain tensor that the optimizer updates in its place."""

    name: str
    param: nn.Parameter
    leaf: Tensor  # the local storage of `param`, or its fp32 master
    master: bool

    def cut_over(self, dim: str) -> bool:
        """Whether the ranks of this mesh dimension hold different parts of the parameter."""
        if not isinstance(self.param, DTensor):
            return False
        names = self.param.device_mesh.mesh_dim_names or ()
        # not is_shard: a dimension that is cut twice is a strided shard for one of its cuts
        return any(
            name == dim and not place.is_replicate()
            for name, place in zip(names, self.param.placements, strict=True)
        )


def make_slot(name: str, param: nn.Parameter) -> Slot:
    """The slot of a parameter; an fp32 master where its own type is too coarse to add up in."""
    local = local_part(param)
    if param.dtype in (torch.bfloat16, torch.float16):
        return Slot(name, param, local.float().requires_grad_(), master=True)
    # the same storage: a step on the leaf is a step on the parameter
    return Slot(name, param, local.detach().requires_grad_(), master=False)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank stores, sharing its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_grad(param: nn.Parameter) -> Tensor:
    """The local gradient, placed as the parameter is.

    An untied vocabulary-sharded embedding hands back a replicated gradient; taking this rank's
    slice of it costs no communication.
    """
    grad = param.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    if not isinstance(param, DTensor):
        return grad.full_tensor()
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def placed(param: nn.Parameter, local: Tensor) -> Tensor:
    """`local` as a DTensor like `param`, when `param` is one and `local` is a part of it."""
    local = local.detach()
    if not isinstance(param, DTensor) or local.shape != local_part(param).shape or not param.ndim:
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def buckets(slots: Sequence[Slot]) -> list[list[int]]:
    """Consecutive slots of one dtype, up to `BUCKET_ELEMENTS` a bucket."""
    out: list[list[int]] = []
    size = 0
    for i, slot in enumerate(slots):
        same = bool(out) and slots[out[-1][0]].leaf.dtype == slot.leaf.dtype
        if not same or size + slot.leaf.numel() > BUCKET_ELEMENTS:
            out.append([])
            size = 0
        out[-1].append(i)
        size += slot.leaf.numel()
    return out
