"""Cut a Hugging Face model over the tensor-parallel ranks, by the plan that the model carries.

A plan maps module names, with `*` for a layer's number, to a style. Only the styles whose
gradients are known to be right here are applied; every other one is refused by name, before any
weight is loaded. A model without a plan keeps its backbone whole on every rank, and only its
embedding and head are cut.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from vocabtp.dist import VocabShard
from vocabtp.opsd.errors import ModelError

Role = Literal["colwise", "rowwise", "sum_gradient", "embedding", "head"]
_ROLE_OF_STYLE: dict[str, Role] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "sum_gradient",
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
        ModelError: A style that is not supported, heads or sizes that `tp` does not fit.
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
    styles = {path: style for path, role in roles.items() if (style := _style(role)) is not None}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if tied:
        # parallelize_module leaves two parameters where there was one
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for path, role in roles.items():
        module = model.get_submodule(path)
        if role == "sum_gradient":
            sum_gradient(module, mesh.get_group())
        elif role == "embedding":
            look_up_own_rows(module, mesh.get_group())


def is_tied(model: Any) -> bool:
    """Whether embedding and head are one parameter."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def sum_gradient(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a replicated module whose input is this rank's part (its heads).

    Inside its forward the module sees each parameter through a function that is the identity
    forward and an all-reduce backward. A hook on the parameter's gradient would be wrong where
    micro-batches accumulate: it would sum again what was summed before.

    Args:
        module: A module with plain parameters, used equally by every rank of the group.
        group: The tensor-parallel peers.
    """
    whole: list[dict[str, Tensor | None]] = []

    def swap(_module: nn.Module, _args: Any) -> None:
        parameters: dict[str, Any] = module._parameters
        # kept per call: others, such as FSDP, put parameters of their own in place of these
        whole.append(dict(parameters))
        for key, parameter in parameters.items():
            if parameter is not None:
                # the dict, not setattr: a module refuses a plain tensor as its parameter
                parameters[key] = _sum_gradient(parameter, group)

    def restore(_module: nn.Module, _args: Any, _output: Any) -> None:
        parameters: dict[str, Any] = module._parameters
        parameters.update(whole.pop())

    module.register_forward_pre_hook(swap)
    module.register_forward_hook(restore, always_call=True)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _CutRows(ParallelStyle):
    """The weight becomes a DTensor of rows; the forward is left to `look_up_own_rows`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.get_parameter("weight")
        rows = distribute_tensor(whole, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.register_parameter("weight", nn.Parameter(rows, whole.requires_grad))
        return module


def look_up_own_rows(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let an embedding whose weight is a DTensor of rows add up what each rank looks up.

    The DTensor library's own row-cut embedding gives each rank a gradient of the whole
    vocabulary; here it is this rank's rows, cut as the weight is.

    Args:
        module: An `nn.Embedding`, its weight cut by rows over the group.
        group: The tensor-parallel peers.
    """
    assert isinstance(module, nn.Embedding)
    assert isinstance(module.weight, DTensor)
    shard = VocabShard.resolve(module.weight.to_local().shape[0], group)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - shard.start if shard.start <= padding < shard.end else None
    calls: list[tuple[Any, Tensor]] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < size:
            raise IndexError(f"a token id is not in [0, {size}): got {ids.min()} to {ids.max()}")
        other = (ids < shard.start) | (ids >= shard.end)
        parameters: dict[str, Any] = module._parameters
        calls.append((parameters["weight"], other))
        parameters["weight"] = parameters["weight"].to_local()
        return ((ids - shard.start).masked_fill(other, 0), *args[1:])

    def after(_module: nn.Module, _args: Any, output: Tensor | None) -> Tensor | None:
        weight, other = calls.pop()
        module._parameters["weight"] = weight
        if output is None:
            return None
        summed: Tensor = _sum_output(output.masked_fill(other.unsqueeze(-1), 0), group)
        return summed

    size = shard.global_size
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# torch does not annotate apply
_sum_gradient: Any = _SumGradient.apply
_sum_output: Any = _SumOutput.apply


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
    if role in ("colwise", "rowwise"):
        # between the two the activations are plain tensors, which DTensor takes for equal parts
        if size % tp:
            raise ModelError(
                f"{name}: parallel.tp {tp} does not divide the size {size} of {path}: "
                "choose a parallel.tp that does"
            )
    # as torch.chunk cuts: the last ranks may get nothing, and would fail alone in the forward
    elif -(-size // tp) * (tp - 1) >= size:
        raise ModelError(
            f"{name}: cutting {path} of size {size} over parallel.tp {tp} leaves a rank without "
            "any part: choose a smaller parallel.tp"
        )


def _style(role: Role) -> ParallelStyle | None:
    match role:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "embedding":
            return _CutRows()
        case "head":
            return ColwiseParallel(output_layouts=Shard(-1), use_local_output=True)
        case "sum_gradient":
            return None
