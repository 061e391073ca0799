"""The optimizer of a run, over whatever tensors an engine hands it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vocabtp.opsd.config import TrainingConfig

# what an optimizer keeps for a parameter
STATE = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def make_optimizer(
    leaves: Sequence[Tensor], config: TrainingConfig, *, rate: float
) -> torch.optim.Optimizer:
    """Weight decay on matrices only, never on norms and biases."""
    decay = [leaf for leaf in leaves if leaf.ndim > 1]
    plain = [leaf for leaf in leaves if leaf.ndim <= 1]
    groups = [
        {"params": params, "weight_decay": amount}
        for params, amount in ((decay, config.weight_decay), (plain, 0.0))
        if params
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    return torch.optim.AdamW(
        groups, lr=rate, betas=(config.adam_betas[0], config.adam_betas[1]), eps=config.adam_eps
    )
