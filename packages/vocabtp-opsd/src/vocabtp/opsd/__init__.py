"""On-policy distillation of Hugging Face models with a vocabulary-parallel LM head.

From Python:

    from vocabtp.opsd import Trainer, load_config
    Trainer(load_config("opsd.yaml")).train()

Importing this package loads neither torch nor transformers; the names below do when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vocabtp.opsd._version import __version__

if TYPE_CHECKING:
    from vocabtp.opsd.config import Config, load_config
    from vocabtp.opsd.errors import CheckpointError, ConfigError, DataError, ModelError, UserError
    from vocabtp.opsd.loss import distill_loss
    from vocabtp.opsd.trainer import Trainer

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "ModelError",
    "Trainer",
    "UserError",
    "__version__",
    "distill_loss",
    "load_config",
]

_HOMES = {
    "CheckpointError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "ModelError": "errors",
    "Trainer": "trainer",
    "UserError": "errors",
    "distill_loss": "loss",
    "load_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
