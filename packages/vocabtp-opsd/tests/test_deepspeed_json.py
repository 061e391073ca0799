"""What DeepSpeed is told; needs no DeepSpeed."""

import json
import sys

import pytest

from tiny_run import tiny_run
from vocabtp.opsd.config import load_config
from vocabtp.opsd.engine.deepspeed_json import complete, frozen, stage_of
from vocabtp.opsd.engine.deepspeed_start import start
from vocabtp.opsd.errors import ConfigError
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.trainer import Trainer

LAYOUT = Layout(tp=2, dp=2)
TRAINING = {"train_batch_size": 12, "micro_batch_size_per_gpu": 3, "max_grad_norm": 0.5}


@pytest.fixture
def config(tmp_path):
    """A configuration, with this as what it says of DeepSpeed."""

    def load(given=None, *overrides):
        path = tiny_run(tmp_path / "run", training=TRAINING)
        options = ("parallel.engine=deepspeed", "parallel.tp=2", *overrides)
        found = load_config(path, options).for_world(4)
        return found if given is None else found.model_copy(update={"deepspeed_config": given})

    return load


def test_what_is_left_out_is_filled_in(config):
    found = complete(config(), LAYOUT)
    assert found["train_micro_batch_size_per_gpu"] == 3
    assert found["gradient_accumulation_steps"] == 2
    assert found["train_batch_size"] == 3 * 2 * 2
    # not DeepSpeed's hidden 1.0: the engine clips, by the configuration's norm
    assert found["gradient_clipping"] == 0.0
    assert found["bf16"] == found["fp16"] == {"enabled": False}
    assert found["zero_optimization"] == {"stage": 0}
    half = complete(config(None, "student.dtype=bfloat16", "parallel.shard=zero2"), LAYOUT)
    assert half["bf16"] == {"enabled": True}
    assert half["data_types"] == {"grad_accum_dtype": "fp32"}
    assert half["communication_data_type"] == "fp32"
    assert half["zero_optimization"] == {"stage": 2}


def test_other_data_types_leave_the_one_of_sums(config):
    options = ("student.dtype=bfloat16", "parallel.shard=zero2")
    for said, wanted in (
        ({"keep_in_fp32_modules": "auto"}, "fp32"),
        ({"grad_accum_dtype": None}, "fp32"),
        ({"grad_accum_dtype": "bf16"}, "bf16"),
    ):
        found = complete(config({"data_types": said}, *options), LAYOUT)
        assert found["data_types"] == {**said, "grad_accum_dtype": wanted}


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_bfloat16_add_up_in_float32_with_stage_2_only(config, stage):
    given = {"zero_optimization": {"stage": stage}}
    shard = f"parallel.shard={'zero2' if stage else 'none'}"
    options = ("student.dtype=bfloat16", shard)
    assert "data_types" not in complete(config(given, *options), LAYOUT)
    given["data_types"] = {"grad_accum_dtype": "fp32"}
    with pytest.raises(ConfigError, match=rf"grad_accum_dtype .* stage {stage} .* take stage 2"):
        complete(config(given, *options), LAYOUT)


def test_what_agrees_is_kept(config):
    given = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "communication_data_type": "fp16",
        "steps_per_print": 7,
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "none"},
        },
    }
    before = json.dumps(given)
    found = complete(config(given, "parallel.shard=zero2"), LAYOUT)
    assert found["communication_data_type"] == "fp16"
    assert found["steps_per_print"] == 7
    assert found["zero_optimization"] == {"stage": 1, "overlap_comm": True}
    # AutoTP would cut a second time
    assert "tensor_parallel" not in found
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"train_batch_size": 8}, ["train_batch_size is 8", "12"]),
        ({"gradient_accumulation_steps": 1}, ["training.gradient_accumulation_steps"]),
        ({"gradient_clipping": 1.0}, ["1.0", "0.5", "training.max_grad_norm"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op"]),
        ({"bf16": {"enabled": True}}, ["bf16.enabled", "student.dtype"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled", "student.dtype"]),
        ({"bf16": True}, ["bf16 must be an object"]),
        ({"tensor_parallel": {"autotp_size": 4}}, ["autotp_size is 4", "parallel.tp is 2"]),
        ({"zero_optimization": {"stage": 3}}, ["stage", "is 3", "parallel.shard is none"]),
        ({"zero_optimization": {"stage": False}}, ["stage", "False"]),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ["zero_optimization.offload_optimizer"],
        ),
        ({"zero_optimization": {"cpu_offload": True}}, ["zero_optimization.cpu_offload"]),
    ],
)
def test_what_contradicts_is_refused_by_key(config, given, names):
    with pytest.raises(ConfigError, match="deepspeed_config") as caught:
        complete(config(given), LAYOUT)
    assert all(name in str(caught.value) for name in names)


def test_the_stage_comes_from_either_side(config):
    two = {"zero_optimization": {"stage": 2}}
    assert stage_of(config()) == 0
    assert stage_of(config(None, "parallel.shard=zero2")) == 2
    assert stage_of(config({"zero_optimization": {"stage": 1}}, "parallel.shard=zero2")) == 1
    assert stage_of(config(two, "parallel.shard=zero2")) == 2
    with pytest.raises(ConfigError, match=r"parallel.shard is none and .*stage .* is 2"):
        stage_of(config(two))


def test_a_file_of_deepspeed_is_read(config, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    chosen = config(None, f"deepspeed_config={file}")
    assert chosen.parallel.shard == "zero2"
    found = complete(chosen, LAYOUT)
    assert found["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    file.write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match=r"ds.json:1: zero_optimization.stage is 3"):
        config(None, f"deepspeed_config={file}")


def test_a_teacher_in_parts(config):
    found = frozen(config(None, "teacher.dtype=bfloat16"), LAYOUT)
    assert found["zero_optimization"] == {"stage": 3}
    assert found["bf16"] == {"enabled": True}
    assert found["train_batch_size"] == LAYOUT.dp
    given = {"zero_optimization": {"stage3_max_live_parameters": 7, "overlap_comm": True}}
    found = frozen(config(given), LAYOUT)
    assert found["zero_optimization"] == {"stage": 3, "stage3_max_live_parameters": 7}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.shard=zero3"], "parallel.shard"),
        (["teacher.offload_to_cpu=true", "parallel.teacher_shard=zero3"], "teacher.offload_to_cpu"),
        (["parallel.engine=torch", "parallel.teacher_shard=zero3"], "parallel.teacher_shard"),
    ],
)
def test_keys_that_do_not_go_together(config, overrides, key):
    with pytest.raises(ConfigError, match=key):
        config(None, *overrides)


def test_without_deepspeed_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    trainer = Trainer(load_config(tiny_run(tmp_path), ["parallel.engine=deepspeed"]))
    with pytest.raises(ConfigError, match=r"vocabtp-opsd\[deepspeed\]"):
        trainer.check()
    # in vain otherwise
    assert trainer._models is None
    with pytest.raises(ConfigError, match=r"vocabtp-opsd\[deepspeed\]"):
        start(Layout())
