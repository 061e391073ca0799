"""What a DTensor says of its shard: group, bounds, local tensor. Nothing here communicates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vocabtp.dist.collectives import group_rank, group_size
from vocabtp.dist.shard import VocabShard, even_bounds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(x: object) -> TypeIs[DTensor]:
    """Whether `x` is a DTensor; does not import the DTensor machinery to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def shard_of(x: DTensor, name: str) -> VocabShard:
    """The shard of a DTensor cut on its last dimension over a one-dimensional mesh.

    Args:
        x: `[..., V]`, placement `Shard(-1)`.
        name: the argument's name, for the message.

    Returns:
        This rank's shard; bounds are those of `torch.chunk`, which DTensor uses.

    Raises:
        ValueError: the mesh has more dimensions, or the last dimension is not what is sharded.
    """
    placement = _only_placement(x, name)
    # by name and not by class: _StridedShard derives from Shard in some versions
    if type(placement).__name__ != "Shard" or placement.dim % x.ndim != x.ndim - 1:
        raise ValueError(
            f"{name} is a DTensor placed {placement}: it must be sharded on its last dimension, "
            f"Shard({x.ndim - 1}); redistribute it, or pass .to_local() of a replicated one "
            "without a tp_group"
        )
    group = x.device_mesh.get_group()
    start, end = even_bounds(x.shape[-1], group_size(group))[group_rank(group)]
    return VocabShard(start, end, x.shape[-1], group)


def group_of(x: DTensor, name: str) -> ProcessGroup:
    """The group of a DTensor's one-dimensional mesh."""
    _only_placement(x, name)
    return x.device_mesh.get_group()


def local_columns(x: Any) -> Any:
    """The local columns `[..., L]` of a DTensor, whose gradient returns to it cut alike.

    Anything that is no DTensor is returned as it is.
    """
    if not is_dtensor(x):
        return x
    if torch.compiler.is_compiling():
        return x.to_local(grad_placements=tuple(x.placements))
    return _LocalColumns.apply(x)  # type: ignore[no-untyped-call]


class _LocalColumns(torch.autograd.Function):
    """`to_local`, but for the global strides of the gradient.

    torch infers them from this rank's width times the ranks, which is wrong for uneven shards.
    `backward()` then copies the gradient into the right ones, and in torch 2.11 the copy that
    becomes `.grad` is not cut like the tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.kind, ctx.shape = type(x), x.shape
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        local: torch.Tensor = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        strides = torch.empty(ctx.shape, device="meta").stride()
        result: DTensor = ctx.kind.from_local(
            grad.contiguous(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=strides,
        )
        return result


def unchanged(local: Sequence[Tensor], read: Iterable[object]) -> list[Tensor]:
    """`local`, whose backward raises where a DTensor of `read` has changed in place, as torch's do.

    An operation in place on a DTensor is counted on the DTensor alone. Its local tensor, which is
    what the ops keep for their backward, tells nothing.
    """
    if torch.compiler.is_compiling() or not any(is_dtensor(x) for x in read):
        return list(local)
    # those of inference mode are not counted at all
    kept = [x.detach() for x in read if is_dtensor(x) and not x.is_inference()]
    return [
        _Unchanged.apply(x, *kept) if x.requires_grad else x  # type: ignore[no-untyped-call]
        for x in local
    ]


class _Unchanged(torch.autograd.Function):
    """Passes a gradient on, unless one of `read` has another version than in the forward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, *read: DTensor) -> Tensor:
        ctx.save_for_backward(*read)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # who asks for them has the versions compared
        return grad, *(None for _ in ctx.saved_tensors)


def local_replica(x: Any, name: str) -> Any:
    """A replicated DTensor as its local tensor; anything that is no DTensor as it is.

    Raises:
        ValueError: a DTensor that is sharded or partial.
    """
    if not is_dtensor(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(
            f"{name} is a DTensor placed {tuple(x.placements)}: every rank needs all of it, "
            "so it must be replicated"
        )
    return x.to_local()


def _only_placement(x: DTensor, name: str) -> Any:
    if x.device_mesh.ndim != 1:
        raise ValueError(
            f"{name} is a DTensor on a mesh of {x.device_mesh.ndim} dimensions: it must be sharded "
            "over a one-dimensional mesh (mesh['tp'])"
        )
    return x.placements[0]
