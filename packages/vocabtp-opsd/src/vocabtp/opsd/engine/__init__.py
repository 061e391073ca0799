"""Training engines: what turns gradients into an optimizer step."""

from vocabtp.opsd.engine.base import Engine, StepResult
from vocabtp.opsd.engine.schedule import Schedule
from vocabtp.opsd.engine.torch_engine import TorchEngine

__all__ = ["Engine", "Schedule", "StepResult", "TorchEngine"]
