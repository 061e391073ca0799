"""The decoder layers of a model, and what is done to each of them alike.

Their `forward` is replaced on the instance, inside of all hooks: those that gather sharded
parameters for a layer then run once a forward and once a backward, whatever the layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vocabtp.opsd.errors import ModelError


def decoder_layers(module: Any) -> list[nn.Module]:
    """The decoder layers, by the class names that the model library never splits."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [
        part
        for part in module.modules()
        # sharded layers are of a class derived from their own
        if any(kind.__name__ in names for kind in type(part).__mro__)
    ]


def checkpoint_layers(module: Any, name: str) -> None:
    """Keep of each layer only its input for the backward, which runs the layer again.

    The second run draws the first one's dropout. Tensor-parallel peers run it in the same order,
    as they do all of a backward, so its collectives meet. Without gradients nothing changes.

    Args:
        module: A Hugging Face causal LM, changed in place.
        name: What errors call it.

    Raises:
        ModelError: The model does not say which modules are its layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ModelError(
            f"{name}: names no decoder layers (_no_split_modules), so that their activations "
            "cannot be left out: set training.activation_checkpointing to false"
        )
    for layer in layers:
        layer.forward = _run_again_for_gradients(layer.forward)


def _run_again_for_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return run
