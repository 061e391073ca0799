"""DeepSpeed's JSON beside our settings: what both have is one value, and DeepSpeed gets it."""

import pytest
import yaml

from deepspeed_files import ZERO2
from vocabtp.opsd.config import load_config

# theirs, ours, and what ours is made of it
SAME = [
    ({"train_batch_size": 12}, "training.train_batch_size", 12),
    ({"train_micro_batch_size_per_gpu": 3}, "training.micro_batch_size_per_gpu", 3),
    ({"gradient_accumulation_steps": 5}, "training.gradient_accumulation_steps", 5),
    ({"gradient_clipping": 0.25}, "training.max_grad_norm", 0.25),
    ({"gradient_clipping": 0}, "training.max_grad_norm", 0),
    ({"optimizer": {"type": "SGD"}}, "training.optimizer", "sgd"),
    ({"optimizer": {"type": "Adam"}}, "training.optimizer", "adamw"),
    ({"optimizer": {"params": {"lr": "2e-5"}}}, "training.learning_rate", 2e-5),
    ({"optimizer": {"params": {"weight_decay": 0.3}}}, "training.weight_decay", 0.3),
    ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, "training.adam_betas", (0.8, 0.9)),
    ({"optimizer": {"params": {"eps": 1e-6}}}, "training.adam_eps", 1e-6),
    ({"bf16": {"enabled": False}}, "student.dtype", "float32"),
    ({"bfloat16": {"enabled": True}}, "student.dtype", "bfloat16"),
    ({"data_types": {"param_dtype": "fp32"}}, "student.dtype", "float32"),
    ({"data_types": {"param_dtype": "torch.bfloat16"}}, "student.dtype", "bfloat16"),
    ({"zero_optimization": {"stage": 0}}, "parallel.shard", "none"),
    ({"zero_optimization": {"stage": 1}}, "parallel.shard", "zero2"),
    ({"zero_optimization": {"stage": 3}}, "parallel.shard", "zero3"),
    ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tp", 2),
    ({"tensor_parallel": {"autotp_size": 0}}, "parallel.tp", 1),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},
        "training.lr_scheduler",
        "constant",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4}}},
        "training.warmup_steps",
        4,
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}}},
        "training.lr_scheduler",
        "cosine",
    ),
]
CHOICES = {
    "sgd": "adamw",
    "adamw": "sgd",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "none": "zero2",
    "zero2": "zero3",
    "zero3": "none",
    "constant": "linear",
    "cosine": "constant",
}


@pytest.mark.parametrize(("theirs", "key", "value"), SAME)
def test_a_setting_of_both_has_one_value(
    load_theirs, refusal_of_theirs, theirs, key, value, tmp_path
):
    section, name = key.split(".")
    # left open here: taken over
    assert getattr(getattr(load_theirs(theirs), section), name) == value
    # the same said twice
    plain = list(value) if isinstance(value, tuple) else value
    assert getattr(getattr(load_theirs(theirs, {section: {name: plain}}), section), name) == value
    # something else said: both keys, both places
    if name == "adam_betas":
        other = [0.7, 0.7]
    else:
        other = CHOICES.get(value) if isinstance(value, str) else value + 1
    text = refusal_of_theirs(theirs, {section: {name: other}})
    assert text.startswith(f"{tmp_path}/ds.json:")
    assert f"but {key} is " in text
    assert f"({tmp_path}/run.yaml:" in text
    assert "leave one out" in text


def test_what_deepspeed_gets_says_all_of_it(load_theirs):
    """No default of DeepSpeed's stands in for a setting of ours: clipping would be on."""
    config = load_theirs(
        {}, {"training": {"max_grad_norm": 0}, "parallel": {"shard": "zero3", "tp": 2}}
    )
    assert config.for_world(4).deepspeed_config == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    }


def test_clipping_that_nobody_asked_for_is_told(load_theirs, warned):
    assert load_theirs({}).deepspeed_config["gradient_clipping"] == 1.0
    assert "gradients are clipped to the norm 1.0" in warned.text
    warned.clear()
    load_theirs({"gradient_clipping": "auto"}, {"training": {"max_grad_norm": 1.0}})
    assert "clipped" not in warned.text


def test_auto_is_our_value_or_deepspeeds_default(load_theirs):
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 10,
            "stage3_prefetch_bucket_size": "auto",
        },
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    config = load_theirs(
        theirs, {"training": {"train_batch_size": 4, "max_grad_norm": 0.5}}
    ).for_world(2)
    assert config.deepspeed_config == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10},
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    assert config.training.learning_rate == 1e-6
    assert config.training.warmup_steps == 0


def test_deepspeed_counts_sequences(load_theirs, refusal_of_theirs):
    ours = {"rollout": {"n_samples_per_prompt": 4, "temperature": 1.0}}
    config = load_theirs(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, ours
    ).for_world(2)
    assert config.training.train_batch_size == 2
    assert config.training.gradient_accumulation_steps == 2
    assert config.deepspeed_config["train_batch_size"] == 8
    assert "6 is no multiple of rollout.n_samples_per_prompt 4" in refusal_of_theirs(
        {"train_batch_size": 6}, ours
    )


def test_whole_heads_are_a_route(load_theirs, refusal_of_theirs):
    theirs = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False}}
    assert "but distillation.loss_backend is 'vocab_parallel': dense keeps" in refusal_of_theirs(
        theirs
    )
    config = load_theirs(theirs, {"distillation": {"loss_backend": "dense"}})
    assert config.deepspeed_config["tensor_parallel"]["vocab_parallel_lm_head"] is False
    alone = {"tensor_parallel": {"vocab_parallel_lm_head": False}}
    assert "tensor_parallel" not in load_theirs(alone).deepspeed_config


def test_a_teacher_on_the_host_is_sharded_too(load_theirs):
    config = load_theirs({"zero_optimization": {"stage": 3}}, {"teacher": {"offload_to_cpu": True}})
    assert config.parallel.shard == "zero3"
    assert config.teacher.offload_to_cpu


def test_the_students_type_is_said_once(load_theirs, refusal_of_theirs, tmp_path):
    theirs = {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}
    config = load_theirs(theirs)
    assert "data_types" not in config.deepspeed_config
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again, ["student.dtype=float32"]).student.dtype == "float32"
    theirs["data_types"]["param_dtype"] = "fp32"
    assert refusal_of_theirs(theirs) == (
        f"{tmp_path}/ds.json:6: data_types.param_dtype is 'fp32', but student.dtype is 'bfloat16' "
        f"({tmp_path}/ds.json:3): they are one setting; make them agree or leave one out"
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_resolved_configuration_is_read_back(load_theirs, tmp_path, stage):
    theirs = {
        **ZERO2,
        "zero_optimization": {"stage": stage, "sub_group_size": 5},
        "tensor_parallel": {"autotp_size": 2},
    }
    config = load_theirs(
        {key: theirs[key] for key in theirs if key != "train_batch_size"}
    ).for_world(4)
    assert config.deepspeed_config["zero_optimization"] == {"stage": stage, "sub_group_size": 5}
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert config.flat()["deepspeed_config"] == yaml.safe_load(config.dump())["deepspeed_config"]
    # each setting is written once, so that it can be changed in one place
    changed = load_config(again, ["training.max_grad_norm=0.125", "parallel.tp=1"])
    assert changed.deepspeed_config["gradient_clipping"] == 0.125
    assert "autotp_size" not in changed.deepspeed_config.get("tensor_parallel", {})
