"""Load a model so that every rank reads and keeps only its own part of the weights.

The model is built without memory, cut by its plan, and then each cut or whole tensor is read from
the safetensors files where this rank needs it. On the host a rank needs its share of the model and,
for a moment, the pages of one tensor; never the whole model. Where data-parallel ranks shard the
model further, that share is their part of it: no tensor is made whole first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from vocabtp.opsd.engine.places import even_sizes, place_of
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.model_files import (
    auto_model,
    kept_in_float32,
    model_source,
    one_line,
    quiet,
)
from vocabtp.opsd.weight_files import (
    Stored,
    converted_key,
    find_files,
    match,
    read_headers,
    tied_names,
    untied_by_value,
)

if TYPE_CHECKING:
    from vocabtp.opsd.config import StudentConfig
    from vocabtp.opsd.parallel import Layout

# settings that make the library do more than read a model's own tensors
_OWN_WAY = ("quantization_config", "auto_map", "transformers_weights", "fusion_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without weights, and where they are.

    Attributes:
        module: The Hugging Face model, its weights on the meta device; None if `reason` is given.
        places: Name in the model to the place of that whole tensor.
        reason: Why the library has to load the whole model instead; None if it need not.
    """

    module: Any = None
    places: dict[str, Stored] = field(default_factory=dict)
    reason: str | None = None


def read_skeleton(
    section: StudentConfig, config: Any, role: str, attention: str | None, layout: Layout
) -> Skeleton:
    """Build the model without weights and find each of them in the files; no collectives.

    Args:
        section: `config.student` or `config.teacher`.
        config: What `read_config` returned.
        role: `"student"` or `"teacher"`, for messages.
        attention: Attention implementation; None for the library's choice.
        layout: This process's place.

    Raises:
        ModelError: The files cannot be read, or do not hold exactly the model's weights.
    """
    with one_line(section, role, "cannot load its weights"), quiet():
        source = model_source(section)
        for key in _OWN_WAY:
            if getattr(config, key, None):
                return Skeleton(reason=f"its configuration has {key}")
        if (Path(source) / "adapter_config.json").is_file():
            return Skeleton(reason="it is an adapter")
        files = find_files(source)
        if not files:
            return Skeleton(reason="it has no model.safetensors")
        if getattr(type(config), "extra_files", None):
            return Skeleton(reason="it has weights in further files")
        stored = read_headers(files)
        module = _build(section, config, source, attention)
        reason = _why_whole(module, stored, getattr(torch, section.dtype), layout)
        if reason is not None:
            return Skeleton(reason=reason)
        places = match(module, stored, f"{role} {section.model_name_or_path!r}")
        return Skeleton(module=module, places=places)


def first_reason(skeleton: Skeleton, layout: Layout) -> str | None:
    """Why some rank needs the whole model, the same on every rank; None if none does."""
    if layout.world_group is None:
        return skeleton.reason
    reasons: list[str | None] = [None] * layout.world
    dist.all_gather_object(reasons, skeleton.reason, group=layout.world_group)
    return next((reason for reason in reasons if reason is not None), None)


def fill(
    module: Any,
    places: dict[str, Stored],
    layout: Layout,
    name: str,
    within: nn.Module | None = None,
    *,
    rounded: torch.dtype | None = None,
    on_host: bool = False,
) -> None:
    """Read this rank's part of every weight that has no memory yet; no collectives.

    Args:
        module: The skeleton's model, cut; its weights are replaced in place and stay tied.
        places: As in the skeleton. A tensor in a file may have more rows than the model's own
            (a vocabulary cut to fewer ids): the first ones are read.
        layout: This process's place.
        name: What errors call the model.
        within: A module of the model, to fill that alone; None for all of it.
        rounded: The type that values of parameters pass through, where they are stored in a wider
            one.
        on_host: Parameters stay in host memory; buffers go to the device.

    Raises:
        ModelError: A file changed or went away since its header was read.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id stays its own
    inside = set((module if within is None else within).modules())
    for path, owner in module.named_modules():
        if owner not in inside:
            continue
        held: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, key, tensor)
            for tensors in (owner._parameters, owner._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and tensor.is_meta
        ]
        for tensors, key, tensor in held:
            if id(tensor) not in done:
                place = places[f"{path}.{key}" if path else key]
                parameter = isinstance(tensor, nn.Parameter)
                device = torch.device("cpu") if parameter and on_host else layout.device
                through = rounded if parameter else None
                try:
                    done[id(tensor)] = (tensor, _filled(tensor, place, device, through))
                except (OSError, SafetensorError, IndexError) as error:
                    raise ModelError(
                        f"{name}: cannot read {place.key} in {place.file}: {error}"
                    ) from error
            tensors[key] = done[id(tensor)][1]


def _build(section: StudentConfig, config: Any, source: str, attention: str | None) -> Any:
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        module = auto_model.from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            **options,
        )
    # `torch.normal` and other constructors take no notice of the device; what they made is read too
    module.to("meta")
    for owner in module.modules():
        for key in owner._non_persistent_buffers_set:
            if (buffer := owner._buffers[key]) is not None:
                owner._buffers[key] = torch.empty_like(buffer, device="cpu")
    # computes these buffers, as the library does; the rest has no memory to write to
    module.initialize_weights()
    if module.can_generate():
        module.generation_config = _generation_config(source)
    return module.eval()


def _generation_config(source: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig.from_pretrained(
            source, config_file_name="config.json", _from_model_config=True
        )


def _why_whole(
    module: Any, stored: dict[str, Stored], dtype: torch.dtype, layout: Layout
) -> str | None:
    if not all(isinstance(value, Tensor) for value in module.state_dict().values()):
        return "it has state that is no tensor"
    # a list may name buffers alone
    if kept := [*module._get_dtype_plan(dtype), *kept_in_float32(module, dtype)]:
        return f"it keeps {kept[0]} in another dtype"
    if (key := converted_key(module, stored)) is not None:
        return f"{key} is converted when it is loaded"
    if patterns := module._keys_to_ignore_on_load_missing:
        absent = any(not stored.keys() & set(names) for names in tied_names(module))
        if absent:
            return f"its files may lack {next(iter(patterns))}"
    if (key := untied_by_value(module, stored, layout.tp_rank, layout.tp)) is not None:
        return f"{key} is tied, but has values of its own in the files"
    return None


def _filled(
    tensor: Tensor, place: Stored, device: torch.device, rounded: torch.dtype | None
) -> Tensor:
    contiguous = torch.contiguous_format
    out = torch.empty_like(tensor.detach(), device=device, memory_format=contiguous)
    local = out.to_local() if isinstance(out, DTensor) else out
    cut = _own_part(tensor)
    # opened for each tensor: the pages that were read leave the memory of this process
    with safe_open(place.file, framework="pt") as reader, torch.no_grad():
        own = reader.get_slice(place.key)[cut] if cut else reader.get_tensor(place.key)
        assert own.shape == local.shape
        local.copy_(own if rounded in (None, local.dtype) else own.to(rounded))
    if not isinstance(tensor, nn.Parameter):
        return out
    filled = nn.Parameter(out, tensor.requires_grad)
    # what AutoTP and `vocabtp.opsd.engine.places` note down on a parameter
    filled.__dict__.update(tensor.__dict__)
    return filled


def _own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part is in the whole tensor."""
    if (known := place_of(tensor)) is not None:
        return known.own
    cut = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        # the last dimension of the mesh cuts first: data-parallel ranks share its parts further
        for axis in reversed(range(mesh.ndim)):
            # for a dimension that is cut twice, a strided shard is one of its cuts
            dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
            start, size = cut[dim].start, cut[dim].stop - cut[dim].start
            sizes, rank = even_sizes(size, mesh.size(axis)), mesh.get_local_rank(axis)
            start += sum(sizes[:rank])
            cut[dim] = slice(start, start + sizes[rank])
    return tuple(cut)
