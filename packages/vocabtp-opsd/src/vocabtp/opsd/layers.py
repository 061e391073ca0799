"""The decoder layers of a model, and what is done to each of them alike.

Their `forward` is replaced on the instance, inside of all hooks: those that gather sharded
parameters for a layer then run once a forward and once a backward, whatever the layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from vocabtp.opsd.errors import ConfigError, ModelError

# layers of student and teacher, of one attention or another, for one sequence or several: all
# variants of one piece of code, of which PyTorch compiles 8 and then, without an error, none
_VARIANTS = 64


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
    for layer in _layers_for(module, name, "training.activation_checkpointing"):
        layer.forward = _run_again_for_gradients(layer.forward)


def compile_layers(
    module: Any, name: str, *, trained: bool, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile what each layer does with whole sequences, of any number and length.

    Answers are decoded by the layers as they are, and a student's layers are compiled for the
    passes with gradients alone. Before `checkpoint_layers`, if both are wanted.

    Args:
        module: A Hugging Face causal LM, changed in place.
        name: What errors call it.
        trained: Whether it is the passes with gradients that count, or those without.
        backend: Of `torch.compile`.

    Raises:
        ConfigError: There is no C++ compiler, which PyTorch needs on the CPU.
        ModelError: The model does not say which modules are its layers.
    """
    layers = _layers_for(module, name, "training.compile")
    if backend == "inductor" and next(module.parameters()).device.type == "cpu":
        _check_compiler()
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _VARIANTS)
    for layer in layers:
        compiled = torch.compile(layer.forward, backend=backend, dynamic=True)
        layer.forward = _for_whole_sequences(layer.forward, compiled, trained)


def _layers_for(module: Any, name: str, key: str) -> list[nn.Module]:
    layers = decoder_layers(module)
    if not layers:
        raise ModelError(
            f"{name}: does not name its decoder layers (_no_split_modules): set {key} to false"
        )
    return layers


def _check_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise ConfigError(
            "training.compile needs a C++ compiler on the CPU, and there is none: install g++, or "
            "set training.compile to false"
        ) from None


def _for_whole_sequences(
    forward: Callable[..., Any], compiled: Callable[..., Any], trained: bool
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        hidden = args[0] if args else None
        whole = (
            torch.is_grad_enabled() == trained
            # a single column would be compiled for itself
            and isinstance(hidden, Tensor)
            and hidden.shape[1] > 1
            and not any(isinstance(value, Cache) for value in (*args, *options.values()))
        )
        return (compiled if whole else forward)(*args, **options)

    return run


def _run_again_for_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return run
