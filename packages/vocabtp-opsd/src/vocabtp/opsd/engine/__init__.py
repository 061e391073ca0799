"""Training engines: what turns gradients into an optimizer step."""

from .base import Engine, StepResult
from .schedule import Schedule
from .torch_engine import TorchEngine

__all__ = ["Engine", "Schedule", "StepResult", "TorchEngine"]
