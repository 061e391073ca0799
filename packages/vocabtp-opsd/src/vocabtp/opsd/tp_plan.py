"""Cut a Hugging Face model over the tensor-parallel ranks, by the plan that the model carries.

A plan maps module names, with `*` for a layer's number, to a style. Only the styles whose
gradients are known to be right here are applied; every other one is refused by name, before any
weight is loaded. A model without a plan keeps its backbone whole on every rank, and only its
embedding and head are cut.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.tp_styles import CutColumns, CutRows, CutVocabulary, SumGradient

Role = Literal["colwise", "rowwise", "sum_gradient", "embedding", "head"]
_ROLE_OF_STYLE: dict[str, Role] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "sum_gradient",
}
_STYLE: dict[Role, type[ParallelStyle]] = {
    "colwise": CutColumns,
    "rowwise": CutRows,
    "sum_gradient": SumGradient,
    "embedding": CutVocabulary,
    "head": CutColumns,
}
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def module_roles(model: Any, tp: int, *, cut_vocab: bool, name: str) -> dict[str, Role]:
    """What tensor parallelism does to each module; works on a model on the meta device.

    Args:
        model: A Hugging Face causal LM.
        tp: Tensor-parallel ranks.
        cut_vocab: Whether embedding and head are cut over the vocabulary.
        name: What errors call the model.

    Returns:
        Module name to role; modules that every rank keeps whole are not in it.

    Raises:
        ModelError: A style that is not supported, weights between cut layers that the plan does
            not name, heads or sizes that `tp` does not fit.
    """
    roles: dict[str, Role] = {}
    if tp == 1:
        return roles
    vocabulary = _vocabulary_modules(model, name)
    plan: dict[str, str] = dict(model.tp_plan or {})
    for path, module in model.named_modules():
        style = plan.get(_LAYER_NUMBER.sub("*", path))
        if path in vocabulary:
            if cut_vocab:
                roles[path] = vocabulary[path]
        elif style is not None:
            roles[path] = _role(path, style, module, name)
    _refuse_parameter_rules(model, plan, name)
    _refuse_unplanned(model, roles, name)
    if any(role == "colwise" for role in roles.values()):
        _check_attention_heads(model.config, tp, name)
    for path, role in roles.items():
        _check_size(path, model.get_submodule(path), role, tp, name)
    return roles


def apply_plan(model: Any, mesh: DeviceMesh, *, cut_vocab: bool, name: str) -> None:
    """Replace the weights by this rank's shards (DTensors), and keep tied weights tied.

    Every rank holds the whole model before; nothing is sent. Embedding and head are cut alike,
    as `torch.chunk` cuts; the head returns this rank's columns as a plain tensor.

    Args:
        model: A Hugging Face causal LM, loaded equally on every rank.
        mesh: The one-dimensional mesh of the tensor-parallel peers.
        cut_vocab: Whether embedding and head are cut over the vocabulary.
        name: What errors call the model.

    Raises:
        ModelError: As `module_roles`.
    """
    roles = module_roles(model, mesh.size(), cut_vocab=cut_vocab, name=name)
    tied = is_tied(model)
    parallelize_module(model, mesh, {path: _STYLE[role]() for path, role in roles.items()})
    if tied:
        # one parameter became two
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def is_tied(model: Any) -> bool:
    """Whether embedding and head are one parameter."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def _vocabulary_modules(model: Any, name: str) -> dict[str, Role]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(
            f"{name}: tensor parallelism needs an nn.Embedding as input and an nn.Linear as head, "
            f"got {type(embedding).__name__} and {type(head).__name__}: set parallel.tp to 1"
        )
    roles: dict[Any, Role] = {embedding: "embedding", head: "head"}
    return {path: roles[module] for path, module in model.named_modules() if module in roles}


def _role(path: str, style: str, module: nn.Module, name: str) -> Role:
    role = _ROLE_OF_STYLE.get(style)
    if role is None or (role != "sum_gradient" and not isinstance(module, nn.Linear)):
        raise ModelError(
            f"{name}: its tensor-parallel plan asks for {style!r} on {path} "
            f"({type(module).__name__}), which is not supported: set parallel.tp to 1"
        )
    return role


def _refuse_parameter_rules(model: Any, plan: dict[str, str], name: str) -> None:
    for path, _ in model.named_parameters():
        if (style := plan.get(_LAYER_NUMBER.sub("*", path))) is not None:
            raise ModelError(
                f"{name}: its tensor-parallel plan asks for {style!r} on the parameter {path}, "
                "which is not supported: set parallel.tp to 1"
            )


def _refuse_unplanned(model: Any, roles: dict[str, Role], name: str) -> None:
    """Whole weights beside cut layers: they see a rank's own heads or units, and no sum is asked.

    Some plans forget them: norms of query and key, activations with weights.
    """
    cut = {path for path, role in roles.items() if role in ("colwise", "rowwise")}
    for parent in sorted({path.rpartition(".")[0] for path in cut}):
        for key, _ in model.get_submodule(parent).named_parameters(prefix=parent):
            if key.rpartition(".")[0] not in roles:
                raise ModelError(
                    f"{name}: its tensor-parallel plan cuts the layers beside {key}, but does not "
                    "say how the ranks sum its gradient: set parallel.tp to 1"
                )


def _check_attention_heads(config: Any, tp: int, name: str) -> None:
    text = config.get_text_config()
    for key, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
    ):
        count = getattr(text, key, None)
        if isinstance(count, int) and count % tp:
            raise ModelError(
                f"{name}: parallel.tp {tp} does not divide its {count} {what} ({key}): "
                "choose a parallel.tp that does"
            )


def _check_size(path: str, module: nn.Module, role: Role, tp: int, name: str) -> None:
    if role == "sum_gradient":
        return
    assert isinstance(module, (nn.Linear, nn.Embedding))
    size = int(module.weight.shape[1 if role == "rowwise" else 0])
    # as torch.chunk cuts: the last ranks may get nothing, and would fail alone in the forward
    if -(-size // tp) * (tp - 1) >= size:
        raise ModelError(
            f"{name}: cutting {path} of size {size} over parallel.tp {tp} leaves a rank without "
            "any part: choose a smaller parallel.tp"
        )
