"""Read a checkpoint's tensors without running code that its files may name."""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

_HARMLESS = (torch.Size, torch.serialization._get_layout, PosixPath, WindowsPath, OrderedDict)


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an enumeration, which Python 3.11.2 for one pickles as a call of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"metadata refers to {name} of {kind}")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    """Builds what the metadata of a checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it belongs to torch's own description of tensors."""
        found = super().find_class(module, name)
        if found is getattr:
            return _member
        described = module.startswith("torch.distributed.checkpoint.") and isinstance(found, type)
        if described or found in _HARMLESS or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"metadata refers to {module}.{name}")


class SafeReader(FileSystemReader):
    """Reads tensors with `weights_only`, and the metadata without running code it may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata that all ranks plan their reads from."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata
