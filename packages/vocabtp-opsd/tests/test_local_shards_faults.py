"""Files of a model that one rank finds damaged: they are named, and no rank fails alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_checkpoints import both_tied_keys, save, section
from vocabtp.opsd import loading as loading_module
from vocabtp.opsd.config import ParallelConfig
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.loading import load_model
from vocabtp.opsd.parallel import make_layout


def file_of(path, key):
    return next(file for file in sorted(path.glob("*.safetensors")) if key in load_file(file))


def damage(path, what):
    """Returns what the message has to say."""
    key = "model.layers.1.mlp.up_proj.weight"
    file = file_of(path, key)
    state = load_file(file)
    said = [key, file.name]
    if what == "missing":
        del state[key]
        said = [key, "model-00001-of", "missing"]
    elif what == "unexpected":
        state["model.layers.7.odd"] = torch.zeros(3)
        said = ["model.layers.7.odd", file.name, "unexpected"]
    elif what == "shape":
        state[key] = state[key][:-1].clone()
        said += ["[44, 48] instead of [45, 48]", "mismatched"]
    if what == "gone":
        file.unlink()
        return [file.name]
    save_file(state, file, {"format": "pt"})
    return said


FAULTS = ["missing", "unexpected", "shape", "gone"]


def vanishing(layout, root, mine):
    """The message where one rank's file goes away between its header and its weights."""
    read_skeleton = loading_module.read_skeleton

    def then_gone(*args):
        skeleton = read_skeleton(*args)
        if mine:
            (root / "vanishing" / "model.safetensors").unlink()
        return skeleton

    loading_module.read_skeleton = then_gone
    try:
        wanted = section(root / ("vanishing" if mine else "whole"))
        with pytest.raises(ModelError) as caught:
            load_model(wanted, layout, trainable=True)
    finally:
        loading_module.read_skeleton = read_skeleton
    return str(caught.value)


def faults(rank, world, root):
    layout = make_layout(ParallelConfig(tp=world, device="cpu"))
    texts = []
    for what in FAULTS:
        # a machine of its own: only the last rank's copy is damaged
        mine = root / (what if rank == world - 1 else "whole")
        with pytest.raises(ModelError) as caught:
            load_model(section(mine), layout, trainable=True)
        texts.append(str(caught.value))
    texts.append(vanishing(layout, root, rank == world - 1))
    # one rank needs the whole model, so all of them read it
    odd = root / ("own-values" if rank == world - 1 else "equal-values")
    model = load_model(section(odd), layout, trainable=True)
    assert not model.tied or rank == 0
    return texts


def test_wrong_files_are_named_and_no_rank_fails_alone(tmp_path, ranks):
    save(tmp_path / "whole")
    save(tmp_path / "vanishing", pieces=False)
    said = {}
    for what in FAULTS:
        save(tmp_path / what)
        said[what] = damage(tmp_path / what, what)
    for name, change in (("equal-values", 0.0), ("own-values", 1.0)):
        both_tied_keys(tmp_path / name, change)
    first, second = ranks(faults, 2, tmp_path, limit=120)
    assert first == second
    said["vanishing"] = ["cannot read model.embed_tokens.weight in", "model.safetensors"]
    for what, text in zip(said, first, strict=True):
        assert all(part in text for part in said[what]), text
        assert "student" in text
        assert "\n" not in text
