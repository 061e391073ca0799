"""What is optimised: the part of `distillation` that the loss reads, with overrides."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from vocabtp.opsd.config import DistillationConfig

LossType = Literal["reverse_kl", "forward_kl", "jsd"]
Backend = Literal["vocab_parallel", "gathered", "dense"]


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What is optimised: the part of `distillation` that the loss reads."""

    loss_type: LossType
    beta: float
    rescale: bool
    pointwise_clip: float | None
    temperature: float
    temperature_squared: bool
    chunk_size: int
    loss_backend: Backend

    def __post_init__(self) -> None:
        if self.loss_type not in get_args(LossType):
            raise ValueError(
                f"loss_type must be one of {', '.join(get_args(LossType))}, got {self.loss_type!r}"
            )
        if self.loss_backend not in get_args(Backend):
            raise ValueError(
                f"loss_backend must be one of {', '.join(get_args(Backend))}, "
                f"got {self.loss_backend!r}"
            )
        if not isinstance(self.chunk_size, int):
            raise TypeError(f"chunk_size must be an int, got {self.chunk_size!r}")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        # `not >` also refuses NaN
        if not self.temperature > 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature must be a finite number > 0, got {self.temperature}")

    @property
    def scale(self) -> float:
        """The factor that keeps gradients comparable over temperatures."""
        return self.temperature**2 if self.temperature_squared else 1.0

    @classmethod
    def of(cls, config: DistillationConfig | LossSpec | None, **overrides: Any) -> LossSpec:
        """The spec of a configuration, or of its defaults, with fields replaced.

        Args:
            config: A `distillation` section; None for its defaults.
            **overrides: Fields by name. `beta` without a configuration means `jsd`.

        Raises:
            TypeError: An unknown field.
            ValueError: A value out of range, or a beta that the loss type would not read.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(overrides) - set(names)):
            raise TypeError(f"unknown argument {unknown[0]!r}; the loss takes {', '.join(names)}")
        if not isinstance(config, DistillationConfig | LossSpec | None):
            raise TypeError(
                f"config must be the distillation section or None, got {type(config).__name__}"
            )
        if config is None and "beta" in overrides:
            overrides.setdefault("loss_type", "jsd")
        base = DistillationConfig() if config is None else config
        values = {name: getattr(base, name) for name in names} | overrides
        if "beta" in overrides and values["loss_type"] != "jsd":
            raise ValueError(
                f"beta belongs to loss_type jsd, but loss_type is "
                f"{values['loss_type']}; leave beta out or set loss_type"
            )
        return cls(**values)
