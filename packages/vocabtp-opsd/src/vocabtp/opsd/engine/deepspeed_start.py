"""DeepSpeed in this process: imported, told the ranks, and kept quiet."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from vocabtp.opsd.errors import ConfigError
from vocabtp.opsd.parallel import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """The layout in the words that DeepSpeed asks a model-parallel program in."""

    layout: Layout

    def get_model_parallel_rank(self) -> int:
        """Place among the tensor-parallel peers."""
        return self.layout.tp_rank

    def get_model_parallel_world_size(self) -> int:
        """Tensor-parallel peers."""
        return self.layout.tp

    def get_model_parallel_group(self) -> ProcessGroup:
        """Group of the tensor-parallel peers."""
        return self._group("tp")

    def get_data_parallel_rank(self) -> int:
        """Which copy this rank belongs to."""
        return self.layout.dp_rank

    def get_data_parallel_world_size(self) -> int:
        """Copies of the models."""
        return self.layout.dp

    def get_data_parallel_group(self) -> ProcessGroup:
        """Group of the ranks with this place in all copies."""
        return self._group("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their ranks in the world."""
        return dist.get_process_group_ranks(self._group("dp"))

    def _group(self, name: str) -> ProcessGroup:
        assert self.layout.mesh is not None
        return self.layout.mesh.get_group(name)


def ranks_of(layout: Layout) -> Ranks | None:
    """What `deepspeed.initialize` takes as `mpu`; None for a single process.

    Also where all ranks are data-parallel: an engine made without it inherits the last one's.
    """
    return None if layout.mesh is None else Ranks(layout)


def check_installed() -> None:
    """Raise a ConfigError unless DeepSpeed is there; imports nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "deepspeed is not installed, which parallel.engine asks for: "
            "pip install 'vocabtp-opsd[deepspeed]', or set parallel.engine to torch"
        )


def start(layout: Layout) -> Any:
    """Import DeepSpeed and let it use the process groups that exist.

    A single process gets a group of its own: DeepSpeed does not work without one.

    Returns:
        The module `deepspeed`.

    Raises:
        ConfigError: It is not installed.
    """
    check_installed()
    # both are read once, when it is imported and when an engine is made
    os.environ.setdefault("DS_ACCELERATOR", layout.device.type)
    os.environ.setdefault("LOCAL_RANK", str(layout.device.index or 0))
    # it calls some functions of torch by the names they had
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # it logs to standard output, which is the user's
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.logger.setLevel(logging.WARNING)
        if not dist.is_initialized():
            backend = "gloo" if layout.device.type == "cpu" else None
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        if layout.device.type == "cpu":
            # shared memory between CPU ranks, compiled at the first run: nothing here calls it
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(verbose=False)
    return deepspeed
