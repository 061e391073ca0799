"""Which rank does what: the (data, tensor) mesh, its groups and this process's device.

Ranks are laid out row by row as `[dp, tp]`, so that the tensor-parallel peers of one model copy
are neighbours and, on the usual launchers, on one machine.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vocabtp.opsd.errors import ConfigError, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from vocabtp.opsd.config import ParallelConfig

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This process's place among the ranks.

    Attributes:
        mesh: The `("dp", "tp")` mesh; None for a single process.
        tp: Ranks that share one copy of the models.
        dp: Copies of the models.
        tp_rank: Place among the tensor-parallel peers.
        dp_rank: Which copy this rank belongs to.
        tp_group: The peers of this copy; None where `tp` is 1.
        dp_group: The ranks with this `tp_rank` in all copies; None where `dp` is 1.
        world_group: All ranks; None for a single process.
        device: Where this rank computes.
        shard: What the ranks of `dp_group` share of the models: `parallel.shard`, where
            `parallel.engine` is torch.
    """

    mesh: DeviceMesh | None = None
    tp: int = 1
    dp: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    tp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    world_group: ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shard: Literal["none", "zero2", "zero3"] = "none"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @property
    def sharded(self) -> bool:
        """Whether the copies hold shards of the models instead of replicas."""
        return self.shard != "none" and self.dp > 1

    @property
    def rank(self) -> int:
        """Rank in the world."""
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block without collectives; if it raises on one rank, every rank raises.

        The rank that failed keeps its own exception. Where the first failing rank raised a
        `UserError`, the others raise one of the same type and text, else a `UserError` that
        names that rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.world_group is not None:
            fact = None if error is None else (self.rank, *_as_user_error(error, self.rank))
            facts: list[tuple[int, type[UserError], str] | None] = [None] * self.world
            dist.all_gather_object(facts, fact, group=self.world_group)
            first = next((f for f in facts if f is not None), None)
            if error is None and first is not None:
                raise first[1](first[2])
        if error is not None:
            raise error


def _as_user_error(error: Exception, rank: int) -> tuple[type[UserError], str]:
    if isinstance(error, UserError):
        return type(error), str(error)
    return UserError, f"rank {rank} failed: {type(error).__name__}: {error}"


def make_layout(parallel: ParallelConfig, *, timeout: timedelta = TIMEOUT) -> Layout:
    """Find this process's place and start `torch.distributed` if there are several ranks.

    A process group that exists already is used as it is. A single process never touches
    `torch.distributed`.

    Args:
        parallel: The configuration's section; `tp`, `device`, `shard` and `nproc` are read.
        timeout: After which a rank gives up waiting for the others.

    Returns:
        The layout, with `dp = ranks / tp`.

    Raises:
        UserError: On every rank, where `tp` does not divide the number of ranks, or the device
            that was asked for is not there.
    """
    started = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    tp = parallel.tp
    if world % tp:
        processes = "one process runs" if world == 1 else f"{world} processes run"
        # a program of one's own: the command would have started them
        lone = world == 1 and (parallel.nproc or 1) > 1
        raise ConfigError(
            f"parallel.tp is {tp}, which does not divide the number of ranks ({processes}): "
            f"start a multiple of {tp} with torchrun --nproc-per-node"
            + ("" if lone else ", or set parallel.nproc")
            + ("; parallel.nproc starts ranks for the command vocabtp-opsd alone" if lone else "")
        )
    device = _device(parallel.device)
    if world == 1:
        return Layout(device=device)
    if not started:
        _start(device, timeout)
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    return Layout(
        mesh=mesh,
        tp=tp,
        dp=world // tp,
        tp_rank=mesh.get_local_rank("tp"),
        dp_rank=mesh.get_local_rank("dp"),
        tp_group=mesh.get_group("tp") if tp > 1 else None,
        dp_group=mesh.get_group("dp") if world > tp else None,
        world_group=dist.group.WORLD,
        device=device,
        shard=parallel.shard,
    )


def shutdown(layout: Layout, *, ok: bool = True) -> None:
    """End `torch.distributed`, on every rank.

    Args:
        layout: What `make_layout` returned.
        ok: Whether this rank ended well. Then it waits for the others first: a rank that leaves
            early resets the connections that its peers still use.
    """
    if layout.world_group is None or not dist.is_initialized():
        return
    if ok:
        dist.barrier()
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Flush the streams and end the process at once with this exit code.

    gloo's threads now and then abort the interpreter's own shutdown, after all work is done; a
    command that ran well would then report a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(device: torch.device, timeout: timedelta) -> None:
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    # both: small facts about the host travel through gloo without a device synchronisation
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timeout, device_id=device)


def _device(wanted: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return torch.device("cpu")
    if found is None or wanted not in ("auto", found.type):
        has = f"only {found.type}" if found is not None else "no accelerator"
        raise ConfigError(
            f"parallel.device is {wanted}, but PyTorch finds {has} on this machine: "
            "set parallel.device to auto or cpu"
        )
    count = torch.accelerator.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if max(local, index + 1) > count:
        raise ConfigError(
            f"{max(local, index + 1)} ranks were started on a machine with {count} {found.type} "
            "device(s): start one rank a device, or set parallel.device to cpu"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)
