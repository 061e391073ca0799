"""Every rank reads its own part of a checkpoint only, and gets the bits that it always got."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tiny_checkpoints import SIZES, both_tied_keys, save, section
from tiny_models import tiny_model
from vocabtp.opsd import loading as loading_module
from vocabtp.opsd.config import ParallelConfig
from vocabtp.opsd.loading import load_model
from vocabtp.opsd.local_shards import Skeleton, fill
from vocabtp.opsd.parallel import Layout, make_layout
from vocabtp.opsd.sharding import release
from vocabtp.opsd.weight_files import read_headers

CASES = [
    ("qwen2", {"tied": False}),
    ("qwen2", {"tied": True}),
    ("qwen3", {}),
    ("llama", {"pad_token_id": 30}),
    ("gemma2", {"tied": True}),
    ("gpt2", {"tied": True}),
]


def tensors(model):
    module = model.module
    named = [*module.named_parameters(remove_duplicate=False)]
    return dict([*named, *module.named_buffers(remove_duplicate=False)])


def same(left, right):
    assert left.keys() == right.keys()
    for name, ours in left.items():
        theirs = right[name]
        assert type(ours) is type(theirs), name
        assert ours.requires_grad == theirs.requires_grad, name
        assert ours.dtype == theirs.dtype, name
        if isinstance(ours, DTensor):
            assert ours.shape == theirs.shape, name
            assert ours.stride() == theirs.stride(), name
            assert ours.placements == theirs.placements, name
            ours, theirs = ours.to_local(), theirs.to_local()
        assert torch.equal(ours, theirs), name


def the_old_way(*_args):
    return Skeleton(reason="a test wants it so")


def both_ways(wanted, layout, **options):
    """A model of which each rank read its parts, and one that each read whole."""
    new = load_model(wanted, layout, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading_module, "read_skeleton", the_old_way)
        return new, load_model(wanted, layout, **options)


def compare(rank, world, root):
    layout = make_layout(ParallelConfig(tp=world, device="cpu"))
    # without a plan for its layers, gpt2 shows nothing more on several ranks
    for number in range(len(CASES) - (world > 1)):
        ways = [{"dtype": "float32", "trainable": True}]
        if number % 2:
            ways.append({"dtype": "bfloat16", "vocab_width": 35, "trainable": False})
        elif number == 4:
            ways.append({"dtype": "float32", "cut_vocab": False, "trainable": True})
        for options in ways:
            wanted = section(root / str(number), options.pop("dtype"))
            new, old = both_ways(wanted, layout, **options)
            same(tensors(new), tensors(old))
            assert new.shard == old.shard
            assert new.tied == old.tied == CASES[number][1].get("tied", False)
            assert new.module.config.to_dict() == old.module.config.to_dict()
            generation = [m.module.generation_config.to_dict() for m in (new, old)]
            assert generation[0] == generation[1]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_are_bit_for_bit_those_of_a_whole_load(tmp_path, ranks, caplog, world):
    for number, (kind, changes) in enumerate(CASES):
        save(tmp_path / str(number), kind, pieces=number % 2 == 0, **changes)
    if world == 1:
        compare(0, 1, tmp_path)
        assert {r.args[1] for r in caplog.records} == {"a test wants it so"}
    else:
        ranks(compare, world, tmp_path, limit=120)


def compare_sharded(rank, world, root):
    """On 2 x 2 ranks, of which two share the copies; layers and the rest are filled one by one."""
    layout = make_layout(ParallelConfig(tp=2, device="cpu", shard="zero3"))
    wanted = section(root, "bfloat16")
    new, old = both_ways(wanted, layout, trainable=True)
    same(tensors(new), tensors(old))
    assert next(new.module.parameters()).device_mesh.ndim == 2
    assert new.tied
    assert old.tied


def test_sharded_copies_get_the_same_bits(tmp_path, ranks):
    save(tmp_path, "qwen2", tied=True)
    ranks(compare_sharded, 4, tmp_path, limit=120)


def compare_copies(rank, world, root):
    """Four copies share five ids: parts of 2, 2, 1 and 0 rows. Then a forward over them."""
    layout = make_layout(ParallelConfig(device="cpu", shard="zero3"))
    tokens = torch.arange(10).view(2, 5) % 5
    mask, response = torch.ones_like(tokens), (torch.arange(5) > 2).expand(2, 5)
    for dtype, trainable, offload in (
        ("float32", True, False),
        ("bfloat16", True, False),
        ("float32", False, False),
        ("bfloat16", False, True),
    ):
        options = {"trainable": trainable, "offload": offload}
        wanted = section(root, dtype)
        new, old = both_ways(wanted, layout, **options)
        same(tensors(new), tensors(old))
        assert new.module.lm_head.weight.to_local().shape[0] == [2, 2, 1, 0][rank]
        # an optimizer holds on to them before the first forward
        parts = [p.to_local().data_ptr() for p in new.module.parameters()]
        with torch.no_grad():
            logits = [model.response_logits(tokens, mask, response) for model in (new, old)]
        assert torch.equal(*logits)
        for model in (new, old):
            release(model.module)
        assert parts == [p.to_local().data_ptr() for p in new.module.parameters()]
        same(tensors(new), tensors(old))


def test_copies_that_share_the_weights_get_the_same_bits(tmp_path, ranks):
    save(tmp_path, "llama", vocab=5, pieces=False)
    ranks(compare_copies, 4, tmp_path, limit=120)


def test_parameters_can_be_kept_on_the_host_and_rounded(tmp_path):
    stored = {"weight": torch.rand(2, 3), "scale": torch.rand(3)}
    save_file(stored, tmp_path / "model.safetensors")
    places = read_headers([tmp_path / "model.safetensors"])
    for device, on_host in (("meta", True), ("cpu", False)):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
        module.register_buffer("scale", torch.empty(3, device="meta"))
        layout = Layout(device=torch.device(device))
        fill(module, places, layout, "m", rounded=torch.bfloat16, on_host=on_host)
        assert torch.equal(module.weight, stored["weight"].bfloat16().float())
        assert module.scale.device.type == device
    assert torch.equal(module.scale, stored["scale"])


def notices(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "vocabtp.opsd"]


def test_what_the_library_converts_or_unties_is_read_whole_with_a_notice(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tiny_model("mixtral").save_pretrained(tmp_path / "mixtral")
    mixtral = load_model(section(tmp_path / "mixtral"), Layout(), trainable=False)
    truth = tiny_model("mixtral").state_dict()
    assert all(torch.equal(v, truth[k]) for k, v in mixtral.module.state_dict().items())
    (notice,) = notices(caplog)
    assert "every rank reads all" in notice
    assert "is converted" in notice

    caplog.clear()
    state = both_tied_keys(tmp_path / "own", 1.0)
    own = load_model(section(tmp_path / "own"), Layout(), trainable=False)
    assert not own.tied
    assert torch.equal(own.module.lm_head.weight, state["lm_head.weight"])
    assert "lm_head.weight is tied, but" in notices(caplog)[0]


def test_keys_that_the_model_class_ignores_and_equal_tied_keys_are_fine(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = both_tied_keys(tmp_path / "equal", 0.0)
    # what older releases saved with every layer
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "equal" / "model.safetensors", {"format": "pt"})
    model = load_model(section(tmp_path / "equal"), Layout(), trainable=True)
    assert model.tied
    assert notices(caplog) == []
    # the tied weight may have the head's name alone
    del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "equal" / "model.safetensors", {"format": "pt"})
    again = load_model(section(tmp_path / "equal"), Layout(), trainable=True)
    assert again.tied
    assert notices(caplog) == []
    same(tensors(again), tensors(model))


def test_weights_that_are_made_off_the_meta_device_are_read_too(tmp_path, caplog):
    """DiffLlama draws its lambdas by a constructor that takes no notice of the device."""
    save(tmp_path, "diffllama")
    truth = tiny_model("diffllama", **SIZES).state_dict()
    model = load_model(section(tmp_path), Layout(), trainable=True)
    assert notices(caplog) == []
    assert any(key.endswith("lambda_q1") for key in truth)
    assert model.module.state_dict().keys() == truth.keys()
    assert all(torch.equal(v, truth[k]) for k, v in model.module.state_dict().items())
