"""What a checkpoint's safetensors files hold, held against what the model needs.

Only the headers of the files are read here. A checkpoint whose tensors are not simply the model's
own, name by name, is left to the library, which then loads the whole model on every rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from vocabtp.opsd.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCK = 1 << 22  # elements compared at a time
MAX_KEYS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: The safetensors file.
        key: Its name in the file.
        shape: Its shape there.
    """

    file: Path
    key: str
    shape: tuple[int, ...]


def find_files(source: str) -> list[Path]:
    """The safetensors files of a model; empty where it has none.

    Args:
        source: A directory, or the name of a model on the hub.

    Raises:
        FileNotFoundError: The index names a file that is not there.
    """
    if (single := _find(source, SINGLE)) is not None:
        return [single]
    index = _find(source, INDEX)
    if index is None:
        return []
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = {name: _find(source, name) for name in names}
    if gone := [name for name, file in files.items() if file is None]:
        raise FileNotFoundError(f"{INDEX} names {gone[0]}, which is not there")
    return [file for file in files.values() if file is not None]


def read_headers(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of these files, by name."""
    found: dict[str, Stored] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118 (not a dict)
                found[key] = Stored(file, key, tuple(reader.get_slice(key).get_shape()))
    return found


def match(module: Any, stored: Mapping[str, Stored], role: str) -> dict[str, Stored]:
    """Where each of the model's tensors is; names of one tied tensor get the same place.

    Args:
        module: A Hugging Face model, on the meta device.
        stored: What the files hold.
        role: What errors call the model.

    Raises:
        ModelError: A key that is missing or that the model does not know, or a wrong shape. What
            the model's class says may be in its files is no error.
    """
    places: dict[str, Stored] = {}
    wrong: list[str] = []
    missing: list[str] = []
    state = module.state_dict()
    for names in tied_names(module):
        here = [stored[name] for name in names if name in stored]
        wanted = tuple(state[names[0]].shape)
        wrong += [
            f"{place.key} (shape {list(place.shape)} instead of {list(wanted)} in "
            f"{place.file.name})"
            for place in here
            if place.shape != wanted
        ]
        if here:
            places.update(dict.fromkeys(names, here[0]))
        else:
            missing.append(names[0])
    ignored = _ignored(module)
    unexpected = [
        f"{key} (in {place.file.name})"
        for key, place in stored.items()
        if key not in places and not (ignored is not None and ignored.search(key))
    ]
    files = sorted({place.file.name for place in stored.values()})
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    _refuse(role, f"missing weights in its files ({files[0]}{others})", missing)
    _refuse(role, "unexpected weights in its files", unexpected)
    _refuse(role, "mismatched weights in its files", wrong)
    return places


def tied_names(module: Any) -> list[list[str]]:
    """Names in the model's state, those of one tensor together, in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def untied_by_value(module: Any, stored: Mapping[str, Stored], part: int, parts: int) -> str | None:
    """The first name of tied weights that the files hold twice, with different values.

    Args:
        module: A Hugging Face model, on the meta device.
        stored: What the files hold.
        part: Which of `parts` equal parts of the rows this process compares.
        parts: Processes that compare together.
    """
    for names in tied_names(module):
        here = [stored[name] for name in names if name in stored]
        for first, other in pairwise(here):
            if first.shape != other.shape or not _same_rows(first, other, part, parts):
                return other.key
    return None


def converted_key(module: Any, stored: Mapping[str, Stored]) -> str | None:
    """The first key that the library renames or computes anew when it loads this model."""
    try:
        # not a public interface: without it, the library has to load the model
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:
        return next(iter(stored), None)
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = module.state_dict()
    for key in stored:
        name, pattern = rename_source_key(
            key, renamings, converters, module.base_model_prefix, state
        )
        if pattern is not None or (name != key and name in state):
            return key
    return None


def _find(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    try:
        found = cached_file(source, name)
    except OSError:
        return None  # not in the repository, or out of reach: the library says which
    return None if found is None else Path(found)


def _ignored(module: Any) -> re.Pattern[str] | None:
    patterns = list(module._keys_to_ignore_on_load_unexpected or ())
    # the library drops these too: buffers that older releases saved
    buffers = [name for name, _ in module.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({p})" for p in patterns)) if patterns else None


def _refuse(role: str, what: str, keys: list[str]) -> None:
    if keys:
        keys = sorted(keys)
        more = f" and {len(keys) - MAX_KEYS_SHOWN} more" if len(keys) > MAX_KEYS_SHOWN else ""
        raise ModelError(f"{role}: {what}: {', '.join(keys[:MAX_KEYS_SHOWN])}{more}")


def _same_rows(first: Stored, second: Stored, part: int, parts: int) -> bool:
    rows = first.shape[0]
    start, end = rows * part // parts, rows * (part + 1) // parts
    step = max(1, _BLOCK * rows // max(1, torch.Size(first.shape).numel()))
    for at in range(start, end, step):
        cut = slice(at, min(at + step, end))
        # opened anew: what was read leaves the memory of this process
        with (
            safe_open(first.file, framework="pt") as one,
            safe_open(second.file, framework="pt") as two,
        ):
            left: Tensor = one.get_slice(first.key)[cut]
            right: Tensor = two.get_slice(second.key)[cut]
            if left.dtype != right.dtype or not torch.equal(left, right):
                return False
    return True
