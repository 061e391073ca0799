"""What a model's class keeps in fp32 within bf16 stays so: loaded, sharded and trained."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_checkpoints import section
from tiny_models import tiny_config, tiny_model
from tiny_run import tiny_run
from vocabtp.dist import VocabShard
from vocabtp.opsd.checkpoint import Checkpoints, model_tensors
from vocabtp.opsd.checkpoint_files import Saved
from vocabtp.opsd.config import ParallelConfig, TrainingConfig, load_config
from vocabtp.opsd.engine import TorchEngine
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.loading import load_model, load_models
from vocabtp.opsd.local_shards import read_skeleton
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.model_files import check_dtypes
from vocabtp.opsd.parallel import Layout, make_layout
from vocabtp.opsd.rollout import Rollout
from vocabtp.opsd.sharding import release
from vocabtp.opsd.teacher import Teacher

EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
# of one the layer reads the router's weight itself, one has sinks among weights of bf16, and one
# makes its routers in fp32 and lists them nowhere
KINDS = {
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "flint": {"num_experts": 4},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
}
KEPT = {
    "deepseek_v2": "mlp.gate.weight",
    "flint": "self_attn.sinks",
    "hunyuan_v1_moe": "mlp.gate.wg.weight",
}
TOKENS = torch.arange(20).view(2, 10)
MASK = torch.ones_like(TOKENS)
RESPONSE = (torch.arange(10) > 3).expand(2, 10)


def saved(path, kind):
    """In fp32: rounded to bf16, every weight is another one."""
    tiny_model(kind, **EXPERTS, **KINDS[kind]).save_pretrained(path)
    return path


def truth(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def logits_of(module):
    return module(TOKENS).logits[:, 3:-1].reshape(-1, 37)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _agrees(rank, world, path, kind, shard, offload):
    """Logits of student and teacher, and what a checkpoint holds, against the library's own."""
    layout = make_layout(ParallelConfig(device="cpu", shard=shard))
    expected = truth(path)
    kept = [name for name, _ in expected.named_parameters() if name.endswith(KEPT[kind])]
    assert len(kept) == 2
    for trainable in (True, False):
        model = load_model(section(path, "bfloat16"), layout, trainable=trainable, offload=offload)
        with torch.no_grad():
            model.module.eval()
            found = model.response_logits(TOKENS, MASK, RESPONSE)
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, logits_of(expected))
            release(model.module)
        tensors = model_tensors(model.module)
        for name, parameter in expected.named_parameters():
            tensor = whole(tensors[f"model.{name}"]).cpu()
            assert tensor.dtype == (torch.float32 if name in kept else torch.bfloat16), name
            assert torch.equal(tensor, parameter), name
    # the test itself: rounded, they would give something else
    for name in kept:
        parameter = expected.get_parameter(name)
        parameter.data = parameter.data.bfloat16().float()
    assert not torch.equal(found, logits_of(expected))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("shard", "offload"), [("none", False), ("zero2", False), ("zero3", True)])
def test_logits_and_weights_are_those_of_the_library(tmp_path, ranks, kind, shard, offload):
    saved(tmp_path, kind)
    ranks(_agrees, 2, tmp_path, kind, shard, offload, limit=120)


def test_they_are_read_before_a_sharded_models_parts(tmp_path):
    """Such a weight is on its device whole when the first unit is sharded."""
    saved(tmp_path, "hunyuan_v1_moe")
    config = AutoConfig.from_pretrained(tmp_path)
    layout = Layout(dp=2, shard="zero2")
    found = read_skeleton(section(tmp_path, "bfloat16"), config, "student", None, layout)
    assert found.reason == "it keeps model.layers.0.mlp.gate.wg.weight in another dtype"


def _trained(rank, world, path, kind):
    """The kept parameters after two steps on other rows on each rank, whole and sharded."""
    out = []
    for shard in ("none", "zero2", "zero3"):
        layout = make_layout(ParallelConfig(device="cpu", shard=shard))
        model = load_model(section(path, "bfloat16"), layout, trainable=True)
        config = TrainingConfig(
            learning_rate=0.01, lr_scheduler="constant", max_grad_norm=0.5, optimizer="sgd"
        )
        engine = TorchEngine(model.module, config, layout, 2)
        for index in range(2):
            for batch in range(2):
                tokens = (TOKENS + 5 * rank + 7 * batch + index) % 37
                logits = model.response_logits(tokens, MASK, RESPONSE)
                loss = logits.float().log_softmax(-1)[:, 3].mean() / -4
                engine.backward(loss, last=batch == 1)
            norm = engine.step(index, tokens=1, report=[0.0], own=[]).grad_norm
        state = engine.state_tensors()
        names = [slot.name for slot in engine.slots]
        tensors = model_tensors(model.module)
        out.append(
            (
                norm,
                {name: whole(tensors[f"model.{name}"]).float() for name in names},
                {name: f"optimizer.{name}.master" in state for name in names},
            )
        )
    return out


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_their_gradients_are_those_of_all_ranks(tmp_path, ranks, kind):
    saved(tmp_path, kind)
    before = dict(truth(tmp_path).named_parameters())
    first, second = ranks(_trained, 2, tmp_path, kind, limit=120)
    reference, weights, masters = first[0]
    kept = [name for name in weights if name.endswith(KEPT[kind])]
    assert not any(masters[name] for name in kept)
    for name in kept:
        assert (weights[name] - before[name]).abs().max() > 1e-5
    for one, other in zip(first, second, strict=True):
        for norm, found, _ in (one, other):
            assert norm == pytest.approx(reference, rel=1e-3)
            for name in kept:
                moved, wanted = found[name] - before[name], weights[name] - before[name]
                torch.testing.assert_close(moved, wanted, rtol=1e-2, atol=1e-6)
        assert all(torch.equal(one[1][name], other[1][name]) for name in weights)


def _through_checkpoints(rank, world, path, root):
    """Weights and optimizer state behind a step, and read again in turn by other layouts."""
    out = []
    for number, shard in enumerate(("zero3", "none", "zero2")):
        layout = make_layout(ParallelConfig(device="cpu", shard=shard))
        model = load_model(section(path, "bfloat16"), layout, trainable=True)
        engine = TorchEngine(model.module, TrainingConfig(learning_rate=0.01), layout, 9)
        checkpoints = Checkpoints(root, layout, 9)
        if number:
            checkpoints.load(checkpoints.path(number), model.module, engine)
        else:
            logits = model.response_logits(TOKENS, MASK, RESPONSE).float()
            engine.backward(-logits.log_softmax(-1)[:, rank].mean(), last=True)
            assert engine.step(0, tokens=1, report=[0.0], own=[]).applied
        checkpoints.save(model.module, engine, Saved(step=number + 1))
        state = model_tensors(model.module) | engine.state_tensors()
        out.append({name: whole(tensor).cpu() for name, tensor in state.items()})
    return out


def test_checkpoints_go_from_one_layout_to_another(tmp_path, ranks):
    saved(tmp_path / "model", "deepseek_v2")
    before = dict(truth(tmp_path / "model").named_parameters())
    for zero3, none, zero2 in ranks(_through_checkpoints, 2, tmp_path / "model", tmp_path / "out"):
        kept = [f"model.{name}" for name in before if name.endswith(KEPT["deepseek_v2"])]
        for name in kept:
            assert zero3[name].dtype == torch.float32
            assert not torch.equal(zero3[name], before[name.removeprefix("model.")])
        assert any(name.endswith("gate.weight.exp_avg") for name in zero3)
        for other in (none, zero2):
            assert other.keys() <= zero3.keys()
            assert all(name in other for name in zero3 if not name.endswith("gate.weight.master"))
            for name, tensor in other.items():
                assert tensor.dtype == zero3[name].dtype, name
                assert torch.equal(tensor, zero3[name]), name


@pytest.mark.parametrize("kind", ["deepseek_v2", "hunyuan_v1_moe"])
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_deepspeed_would_round_them_and_is_refused_before_any_weight(tmp_path, role, kind):
    """Its engine makes all parameters bf16, whatever the model's class says."""
    model = EXPERTS | KINDS[kind]
    parallel = {"device": "cpu", "engine": "deepspeed"}
    if role == "teacher":
        parallel["teacher_shard"] = "zero3"
    other = "teacher" if role == "student" else "student"
    path = tiny_run(
        tmp_path,
        kind=kind,
        model=model,
        parallel=parallel,
        **{role: {"dtype": "bfloat16"}, other: {"dtype": "float32"}},
    )
    for file in tmp_path.glob("*/model.safetensors"):
        file.unlink()
    layout = Layout(dp=2) if role == "teacher" else Layout()
    kept = re.escape(f"model.layers.0.{KEPT[kind]}")
    told = rf"{role} .*{kept} stays in float32 .*DeepSpeed would"
    with pytest.raises(ModelError, match=told):
        load_models(load_config(path), layout, 37)


def test_the_check_leaves_the_configuration_alone(tmp_path):
    """What is built from it in another dtype would otherwise be noted down in it."""
    config = tiny_config("llama")
    before = config.to_dict()
    check_dtypes(section(tmp_path, "bfloat16"), config, "student")
    assert config.to_dict() == before


class KeptHead(nn.Linear):
    """A head in fp32 that takes hidden states of any type, as some models have it."""

    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("payload", ["logits", "hidden"])
def test_a_head_in_fp32_is_scored_in_fp32(payload):
    module = tiny_model("llama").to(torch.bfloat16)
    head = KeptHead(32, 37, bias=False)
    module.lm_head = head
    model = LanguageModel(module=module, shard=VocabShard(0, 37, 37), layout=Layout(), name="t")
    rollout = Rollout(
        tokens=TOKENS,
        attention_mask=MASK,
        response_mask=RESPONSE,
        prompt_lengths=[4, 4],
        response_lengths=[6, 6],
        truncated=[True, True],
        sample_ids=[0, 1],
    )
    teacher = Teacher(model, payload=payload)
    with torch.no_grad(), teacher.score(rollout) as cache:
        # a limit of host memory is held against it: of hidden states in bf16, no more is told
        assert cache.row_nbytes == teacher.payload_nbytes(1)
        expected = logits_of(module)
        assert expected.dtype == torch.float32
        assert not torch.equal(expected, expected.bfloat16().float())
        found = cache.fetch(0, len(cache))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
