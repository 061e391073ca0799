"""Parameters as plain tensors that remember which part of what they are.

DeepSpeed flattens and partitions parameters, which DTensors do not survive. A parameter that is cut
over tensor-parallel ranks becomes its local part, marked as cut in the way that DeepSpeed's norms
ask for; checkpoints and exports make DTensors again of what they read from it.

A DTensor's parts are those of `torch.chunk`. Where DeepSpeed's AutoTP has cut otherwise, its parts
are gathered and cut anew, one tensor at a time, so that any layout can read what was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vocabtp.opsd.engine.slots import local_part

_KEY = "vocabtp_place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of a whole tensor this rank holds.

    Attributes:
        mesh: The one-dimensional mesh of the tensor-parallel peers.
        placements: How the tensor is cut over it.
        shape: Of the whole tensor.
        stride: Of the whole tensor.
        sizes: Of the peers' parts along the cut dimension, unless they are those of `torch.chunk`.
    """

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    @property
    def own(self) -> tuple[slice, ...]:
        """Where this rank's part is in the whole tensor."""
        sizes, rank = self.sizes or self._even, self.mesh.get_local_rank()
        start = sum(sizes[:rank])
        cut = [slice(0, size) for size in self.shape]
        cut[self._dim] = slice(start, start + sizes[rank])
        return tuple(cut)

    def wrap(self, local: Tensor) -> DTensor:
        """A local part as a DTensor.

        It shares the part's memory if `sizes` is None; else all peers call this.
        """
        if self.sizes is not None:
            local = self._cut_anew(local, self.sizes, self._even)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def unwrap(self, wrapped: Tensor) -> Tensor:
        """The local part of what `wrap` made, or of one like it; all peers call this."""
        local = local_part(wrapped)
        return local if self.sizes is None else self._cut_anew(local, self._even, self.sizes)

    @property
    def _dim(self) -> int:
        (placement,) = self.placements
        assert isinstance(placement, Shard)
        return placement.dim

    @property
    def _even(self) -> tuple[int, ...]:
        return even_sizes(self.shape[self._dim], self.mesh.size())

    def _cut_anew(self, local: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
        dim, rank = self._dim, self.mesh.get_local_rank()
        # peers send equally much: the last element of the cut dimension once more, or twice
        index = torch.arange(max(old), device=local.device).clamp(max=old[rank] - 1)
        mine = local.index_select(dim, index)
        parts = [torch.empty_like(mine) for _ in old]
        dist.all_gather(parts, mine, group=self.mesh.get_group())
        whole = torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, old, strict=True)], dim)
        return whole.narrow(dim, sum(new[:rank]), new[rank]).clone()


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Of the parts that `torch.chunk` makes; 0 for those that it does not make."""
    width = -(-size // parts)
    return tuple(max(0, min(width, size - width * i)) for i in range(parts))


def place_of(tensor: Tensor) -> Place | None:
    """The place of a plain parameter; None if every rank holds all of it."""
    found: Place | None = getattr(tensor, _KEY, None)
    return found


def set_place(parameter: nn.Parameter, place: Place) -> None:
    """Say of a plain parameter which part of what it is, to us and to DeepSpeed."""
    setattr(parameter, _KEY, place)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # read by DeepSpeed


def wrapped(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, of the parameter's own shape, as a DTensor if the parameter is cut."""
    place = place_of(parameter)
    return local if place is None else place.wrap(local)


def unwrapped(parameter: Tensor, tensor: Tensor) -> Tensor:
    """What `wrapped` was given, from what it made; on the parameter's device if that is needed."""
    place = place_of(parameter)
    if place is None or place.sizes is None or tensor.shape != place.shape:
        return local_part(tensor)
    return place.unwrap(tensor.to(parameter.device))


def make_plain(module: nn.Module) -> None:
    """Put plain parameters in the place of DTensors, tied ones once; they share the memory."""
    done: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for key, old in parameters.items():
            if not isinstance(old, DTensor):
                continue
            if old not in done:
                done[old] = new = nn.Parameter(local_part(old), old.requires_grad)
                place = Place(
                    mesh=old.device_mesh,
                    placements=old.placements,
                    shape=old.shape,
                    stride=old.stride(),
                )
                set_place(new, place)
            parameters[key] = done[old]
