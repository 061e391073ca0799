"""Parameters as plain tensors that remember which part of what they are.

DeepSpeed flattens and partitions parameters, which DTensors do not survive. A parameter that is cut
over tensor-parallel ranks becomes its local part, marked as cut in the way that DeepSpeed's norms
ask for; checkpoints and exports put the mark back on what they read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vocabtp.opsd.engine.slots import local_part

_KEY = "vocabtp_place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of a whole tensor this rank holds."""

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, local: Tensor) -> DTensor:
        """A local part of this shape as a DTensor, sharing its memory."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def place_of(tensor: Tensor) -> Place | None:
    """The place of a parameter that `make_plain` made; None if every rank holds all of it."""
    found: Place | None = getattr(tensor, _KEY, None)
    return found


def wrapped(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, of the parameter's own shape, as a DTensor if the parameter is cut."""
    place = place_of(parameter)
    return local if place is None else place.wrap(local)


def make_plain(module: nn.Module) -> None:
    """Put plain parameters in the place of DTensors, tied ones once; they share the memory."""
    done: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for key, old in parameters.items():
            if not isinstance(old, DTensor):
                continue
            if old not in done:
                new = nn.Parameter(local_part(old), old.requires_grad)
                place = Place(
                    mesh=old.device_mesh,
                    placements=old.placements,
                    shape=old.shape,
                    stride=old.stride(),
                )
                setattr(new, _KEY, place)
                new.tensor_model_parallel = True  # type: ignore[attr-defined]  # read by DeepSpeed
                done[old] = new
            parameters[key] = done[old]
