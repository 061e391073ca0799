"""The collectives of this package; no other module of it calls `torch.distributed`.

`group=None` stands for a single process everywhere: every function is then the identity, with
`R = 1`, and `torch.distributed` is not touched. A group of one rank costs no collective either.
Letters: `R` ranks, `*` any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from vocabtp import kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 for a single process."""
    return 0 if group is None else dist.get_rank(group)


def group_size(group: ProcessGroup | None) -> int:
    """How many ranks `group` has; 1 for a single process."""
    return 1 if group is None else dist.get_world_size(group)


def check_group(group: object, name: str) -> None:
    """Refuse what is not a process group that this process belongs to.

    Args:
        group: None or a `torch.distributed.ProcessGroup`.
        name: the argument's name, for the message.

    Raises:
        TypeError: `group` is something else.
        ValueError: this process is not in `group` (`new_group` then returns a placeholder).
    """
    if group is None:
        return
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this process is not a member of the group")
    if not isinstance(group, dist.ProcessGroup):
        kind = type(group).__name__
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup or None, got {kind}"
            + _INSTEAD.get(kind, "")
        )


# what belongs to a group and is easily passed in its place
_INSTEAD = {"VocabShard": "; pass it as shard=", "DeviceMesh": "; pass mesh.get_group()"}


def control_device(group: ProcessGroup) -> torch.device:
    """Where small control messages of `group` live: the CPU if its backend can, else its device."""
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[*]` on every rank -> `[R, *]` in rank order; one all_gather, not differentiable.

    The shape and dtype must be the same on every rank. A tensor without elements costs nothing.
    """
    x = x.detach()
    if group_size(group) == 1:
        return x.unsqueeze(0)
    out = x.new_empty((group_size(group), *x.shape))
    if x.numel() > 0:
        # flat, since backends differ in which multi-dimensional outputs they take
        _all_gather(out.view(-1), x.contiguous().view(-1), group)
    return out


def _all_gather(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """One all_gather of flat tensors, under the name that this version of torch has for it."""
    if hasattr(dist, "all_gather_single"):  # torch 2.13 deprecates the older name
        dist.all_gather_single(out, x, group=group)
    else:
        dist.all_gather_into_tensor(out, x, group=group)


def all_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Elementwise sum over ranks, `[*]` -> `[*]`; one all_reduce, not differentiable."""
    return _all_reduce(x, dist.ReduceOp.SUM, group)


def all_max(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Elementwise maximum over ranks, `[*]` -> `[*]`; one all_reduce, not differentiable."""
    return _all_reduce(x, dist.ReduceOp.MAX, group)


def _all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None, *, in_place: bool = False
) -> Tensor:
    x = x.detach()
    if group_size(group) == 1 or x.numel() == 0:
        return x
    x = x.contiguous() if in_place else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group)
    return x


@dataclass(frozen=True)
class GroupExchange:
    """The `vocabtp.kernels.Exchange` over a process group; None is a single process.

    Attributes:
        group: the process group whose ranks hold the shards.
    """

    group: ProcessGroup | None

    @property
    def compiled_name(self) -> str:
        """Its name in a compiled graph: that of the group, as for torch's own collectives there."""
        return f"{_KIND}:{'' if self.group is None else self.group.group_name}"

    def gather(self, x: Tensor) -> Tensor:
        """`[*]` -> `[R, *]` in rank order, the same on all ranks."""
        return all_gather(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over ranks, in place where `x` is contiguous."""
        return _all_reduce(x, dist.ReduceOp.SUM, self.group, in_place=True)


_KIND = "group"


def _of_group(name: str) -> GroupExchange:
    """The exchange over the group that torch.distributed knows by this name."""
    # as torch's own collectives in compiled graphs find theirs
    find: Callable[[str], ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]
    return GroupExchange(find(name) if name else None)


kernels.name_exchanges(_KIND, _of_group)
