"""The trained student as a plain Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vocabtp.opsd.checkpoint import model_tensors
from vocabtp.opsd.errors import CheckpointError
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.sharding import sharding_of


def export_model(model: LanguageModel, tokenizer: Any, path: Path) -> Path:
    """Write a plain Hugging Face directory; every rank takes part.

    Args:
        model: The student.
        tokenizer: Saved beside it.
        path: A directory that does not exist yet, or is empty.

    Returns:
        The directory.

    Raises:
        CheckpointError: On every rank: the directory is not empty or cannot be written.
    """
    layout = model.layout
    with layout.together():
        if layout.is_main and path.is_dir() and any(path.iterdir()):
            raise CheckpointError(f"{path}: is not empty; name a new directory to export to")
    whole: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model.module).items():
        # every rank gathers, one keeps: one tensor at a time is whole on a device
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if layout.is_main:
            whole[name.removeprefix("model.")] = full.detach().cpu()
    with layout.together():
        if layout.is_main:
            path.mkdir(parents=True, exist_ok=True)
            _plain(model.module).save_pretrained(path, state_dict=whole)
            tokenizer.save_pretrained(path)
    return path


def _plain(module: Any) -> Any:
    """The module, or one of the class and dtype that a sharded one had; without weights."""
    sharding = sharding_of(module)
    if sharding is None:
        return module
    plain: Any = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        skeleton = plain(module.config).to(sharding.dtype)
    skeleton.generation_config = module.generation_config
    return skeleton
