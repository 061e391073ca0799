"""DeepSpeed's JSON and the DeepSpeedExamples OPSD application's files, read or refused by key."""

import json
import logging

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vocabtp.opsd._deepspeed_keys import PASSED, READ, REFUSALS
from vocabtp.opsd._deepspeed_keys import SECTIONS as KNOWN
from vocabtp.opsd.config import load_config
from vocabtp.opsd.engine.deepspeed_json import complete
from vocabtp.opsd.errors import ConfigError
from vocabtp.opsd.parallel import Layout

SECTIONS = {
    "student": {"model_name_or_path": "o/s", "dtype": "bfloat16", "trust_remote_code": False},
    "teacher": {
        "model_name_or_path": "o/t",
        "dtype": "bfloat16",
        "trust_remote_code": False,
        "offload_to_cpu": False,
    },
    "rollout": {
        "engine": "hybrid_engine",
        "max_prompt_length": 96,
        "max_response_length": 48,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "n_samples_per_prompt": 1,
        "use_graph_capture": False,
    },
    "distillation": {"loss_type": "jsd", "temperature": 2.0, "chunk_size": 64},
    "training": {
        "train_batch_size": 6,
        "micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "learning_rate": 3e-06,
        "weight_decay": 0.01,
        "num_train_epochs": 2,
        "max_steps": -1,
        "warmup_steps": 0,
        "save_steps": 50,
        "logging_steps": 5,
        "save_dir": "./out",
        "seed": 7,
    },
    "data": {"path": "data/train.jsonl", "prompt_field": "question", "shuffle": True},
    "deepspeed_config": "configs/zero2.json",
}
ZERO2 = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 25,
    "gradient_clipping": 0.7,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "none"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-6, "betas": [0.9, 0.95], "eps": "1e-8", "weight_decay": 0.01},
    },
    "hybrid_engine": {"enabled": True, "max_out_tokens": 256, "inference_tp_size": 1},
}
BASE = {
    "student": {"model_name_or_path": "o/s"},
    "teacher": {"model_name_or_path": "o/t"},
    "data": {"path": "p.jsonl"},
}


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, logger="vocabtp.opsd")
    return caplog


@pytest.fixture
def application(tmp_path, monkeypatch):
    """The application's folder; the run is started somewhere else."""
    (tmp_path / "app" / "configs").mkdir(parents=True)
    (tmp_path / "app" / "data").mkdir()
    (tmp_path / "app" / "data" / "train.jsonl").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def call(sections=SECTIONS, deepspeed=ZERO2):
        folder = tmp_path / "app" / "configs"
        (folder / "zero2.json").write_text(json.dumps(deepspeed, indent=4))
        (folder / "run.json").write_text(json.dumps(sections, indent=4))
        return folder / "run.json"

    return call


@pytest.fixture
def load(tmp_path):
    """Loads BASE with sections of `ours` and a DeepSpeed file of `theirs`."""

    def call(theirs, ours=None, overrides=()):
        values = {key: dict(value) for key, value in BASE.items()}
        for section, keys in (ours or {}).items():
            values.setdefault(section, {}).update(keys)
        values["deepspeed_config"] = "ds.json"
        (tmp_path / "ds.json").write_text(json.dumps(theirs, indent=1))
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return load_config(path, overrides)

    return call


@pytest.fixture
def refusal(load):
    def call(*args):
        with pytest.raises(ConfigError) as caught:
            load(*args)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return call


def test_the_applications_file_is_read_unchanged(application, tmp_path, warned):
    path = application()
    config = load_config(path)
    assert config.rollout.engine == "local"
    assert config.rollout.max_response_length == 48
    assert (config.distillation.loss_type, config.distillation.beta) == ("jsd", 0.5)
    assert config.training.learning_rate == 3e-6
    assert config.training.max_grad_norm == 0.7
    assert config.training.adam_betas == (0.9, 0.95)
    assert config.parallel.shard == "zero2"
    assert config.data.path == str(tmp_path / "app" / "data" / "train.jsonl")
    assert config.for_world(2).deepspeed_config == {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.7,
        "steps_per_print": 25,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "none"},
        },
    }
    notices = warned.messages
    assert "rollout.engine: hybrid_engine is read as local" in notices
    # the application puts its own batch sizes into DeepSpeed's configuration
    assert f"train_batch_size 16 is not used: training.train_batch_size is 6 ({path}:29)" in notices
    assert any(n.startswith("train_micro_batch_size_per_gpu 2 is not used") for n in notices)
    assert any(n.startswith("hybrid_engine is not used") for n in notices)
    assert any(n.startswith("data.chat_template null leaves") for n in notices)


def test_yaml_with_the_content_of_deepspeeds_file(tmp_path):
    path = tmp_path / "run.yaml"
    values = SECTIONS | {"deepspeed_config": ZERO2}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    assert load_config(path).deepspeed_config["gradient_clipping"] == 0.7
    broken = {**ZERO2, "gradient_clipping": -1}
    path.write_text(yaml.safe_dump(SECTIONS | {"deepspeed_config": broken}, sort_keys=False))
    line = path.read_text().splitlines().index("  gradient_clipping: -1") + 1
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}:{line}: training.max_grad_norm must be at least 0, got -1"
    )


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE | {"deepspeed_config": "none.json"}, sort_keys=False))
    with pytest.raises(ConfigError, match=r"run.yaml:7: deepspeed_config: no file 'none\.json'"):
        load_config(path)


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
def test_a_setting_of_both_has_one_value(load, refusal, theirs, key, value, tmp_path):
    section, name = key.split(".")
    # left open here: taken over
    assert getattr(getattr(load(theirs), section), name) == value
    # the same said twice
    plain = list(value) if isinstance(value, tuple) else value
    assert getattr(getattr(load(theirs, {section: {name: plain}}), section), name) == value
    # something else said: both keys, both places
    if name == "adam_betas":
        other = [0.7, 0.7]
    else:
        other = CHOICES.get(value) if isinstance(value, str) else value + 1
    text = refusal(theirs, {section: {name: other}})
    assert text.startswith(f"{tmp_path}/ds.json:")
    assert f"but {key} is " in text
    assert f"({tmp_path}/run.yaml:" in text
    assert "leave one out" in text


def test_what_deepspeed_gets_says_all_of_it(load):
    """No default of DeepSpeed's stands in for a setting of ours: clipping would be on."""
    config = load({}, {"training": {"max_grad_norm": 0}, "parallel": {"shard": "zero3", "tp": 2}})
    assert config.for_world(4).deepspeed_config == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    }


def test_clipping_that_nobody_asked_for_is_told(load, warned):
    assert load({}).deepspeed_config["gradient_clipping"] == 1.0
    assert "gradients are clipped to the norm 1.0" in warned.text
    warned.clear()
    load({"gradient_clipping": "auto"}, {"training": {"max_grad_norm": 1.0}})
    assert "clipped" not in warned.text


def test_auto_is_our_value_or_deepspeeds_default(load):
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
    config = load(theirs, {"training": {"train_batch_size": 4, "max_grad_norm": 0.5}}).for_world(2)
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


def test_deepspeed_counts_sequences(load, refusal):
    ours = {"rollout": {"n_samples_per_prompt": 4, "temperature": 1.0}}
    config = load({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, ours).for_world(2)
    assert config.training.train_batch_size == 2
    assert config.training.gradient_accumulation_steps == 2
    assert config.deepspeed_config["train_batch_size"] == 8
    assert "6 is no multiple of rollout.n_samples_per_prompt 4" in refusal(
        {"train_batch_size": 6}, ours
    )


@pytest.mark.parametrize(
    ("theirs", "key"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"compile": {"deepcompile": True}}, "compile"),
        ({"compile": {"deepcompile": False, "passes": ["autosp"]}}, "compile"),
        ({"hybrid_engine": {"enable_cuda_graph": True}}, "hybrid_engine.enable_cuda_graph"),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "hybrid_engine.inference_tp_size"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"data_types": {"buffer_dtype": "bf16"}}, "data_types.buffer_dtype"),
        ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "optimizer.params.momentum"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        ({"scheduler": {"type": "OneCycle", "params": {"warmup_num_steps": 1}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        (
            {"scheduler": {"params": {"warmup_min_lr": 1e-7}}},
            "scheduler.params.warmup_min_lr",
        ),
        ({"scheduler": {"params": {"warmup_type": "log"}}}, "scheduler.params.warmup_type"),
        (
            {"scheduler": {"params": {"last_batch_iteration": 100}}},
            "scheduler.params.last_batch_iteration",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": True}, "zero_optimization"),
        ({"optimizer": {"params": [1]}}, "optimizer.params"),
    ],
)
def test_what_cannot_be_used_is_refused_by_key(refusal, theirs, key, tmp_path):
    # one key a line, of which the outer two are told apart
    line = 2 if "." not in key else 3
    text = refusal(theirs)
    assert text.startswith(f"{tmp_path}/ds.json:{line}: {key} ")


def test_what_is_switched_off_is_left_out(load):
    off = {
        "pipeline": {},
        "sequence_parallel_size": 1,
        "compile": {"deepcompile": False},
        "fp16": {"enabled": False, "initial_scale_power": 16},
        "amp": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "gradient_allreduce_op": "mean",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "managed_gradient_accumulation": True,
        "sparse_gradients": False,
        "zero_optimization": {"mics_shard_size": -1, "zero_quantized_weights": False},
        "data_types": {"buffer_dtype": "fp32"},
    }
    assert load(off).deepspeed_config == {
        "flops_profiler": {"enabled": False},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping is no key of a DeepSpeed configuration: did"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge is not a key that is known"),
        ({"optimizer": {"params": {"learning_rate": 1}}}, "optimizer.params.learning_rate is not"),
        ({"bf16": {"enable": True}}, "bf16.enable is not a key that is known: did you mean ena"),
    ],
)
def test_unknown_keys_are_refused(refusal, theirs, message):
    assert message in refusal(theirs)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("rollout", "use_graph_capture", True, "rollout.use_graph_capture captures the hybrid"),
        ("rollout", "continuous_batch_size", 4, "training.micro_batch_size_per_gpu is how many"),
        ("rollout", "tensor_parallel_size", 2, "rollout.tensor_parallel_size is parallel.tp here"),
        ("rollout", "gpu_memory_utilization", 0.5, "rollout.gpu_memory_utilization is a setting o"),
        ("rollout", "top_k", 0, "rollout.top_k must be -1 (all tokens) or at least 1, got 0"),
        ("distillation", "temperature", 0, "distillation.temperature must be above 0, got 0"),
    ],
)
def test_the_applications_keys_that_mean_something_else(application, section, key, value, message):
    path = application(SECTIONS | {section: SECTIONS[section] | {key: value}})
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if f'"{key}"' in text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    if section != "distillation":  # the key is there twice
        assert str(caught.value).startswith(f"{path}:{line}: ")


def test_the_teachers_own_tensor_parallelism(application):
    def teacher(size):
        return SECTIONS | {"teacher": SECTIONS["teacher"] | {"autotp_size": size}}

    tensor = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}
    assert load_config(application(teacher(0))).parallel.tp == 1
    assert load_config(application(teacher(2))).parallel.tp == 2
    config = load_config(application(teacher(2), ZERO2 | tensor))
    assert config.deepspeed_config["tensor_parallel"] == tensor["tensor_parallel"]
    with pytest.raises(ConfigError, match=r"autotp_size is 2, but parallel\.tp is 4 \(.*run.js"):
        load_config(application(teacher(4), ZERO2 | tensor))
    with pytest.raises(ConfigError, match=r"teacher\.autotp_size is 2, but parallel\.tp is 4 \(ov"):
        load_config(application(teacher(2)), ["parallel.tp=4"])


def test_short_names_of_types(application):
    teacher = SECTIONS["teacher"] | {"dtype": "fp32"}
    assert load_config(application(SECTIONS | {"teacher": teacher})).teacher.dtype == "float32"


def test_whole_heads_are_a_route(load, refusal):
    theirs = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False}}
    assert "but distillation.loss_backend is 'vocab_parallel': dense keeps" in refusal(theirs)
    config = load(theirs, {"distillation": {"loss_backend": "dense"}})
    assert config.deepspeed_config["tensor_parallel"]["vocab_parallel_lm_head"] is False
    alone = {"tensor_parallel": {"vocab_parallel_lm_head": False}}
    assert "tensor_parallel" not in load(alone).deepspeed_config


def test_a_teacher_on_the_host_is_sharded_too(load):
    config = load({"zero_optimization": {"stage": 3}}, {"teacher": {"offload_to_cpu": True}})
    assert config.parallel.shard == "zero3"
    assert config.teacher.offload_to_cpu


def test_stages_of_the_deepspeed_engine(load, refusal, tmp_path):
    ours = {"parallel": {"engine": "deepspeed"}, "teacher": {"offload_to_cpu": True}}
    config = load({"zero_optimization": {"stage": 1}}, ours)
    assert config.parallel.shard == "zero2"
    assert config.deepspeed_config["zero_optimization"] == {"stage": 1}
    assert refusal({"zero_optimization": {"stage": 3}}, ours).startswith(
        f"{tmp_path}/ds.json:3: zero_optimization.stage is 3, but parallel.engine is 'deepspeed'"
    )
    away = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert refusal(away, ours).startswith(
        f"{tmp_path}/ds.json:4: zero_optimization.offload_optimizer is not supported"
    )
    assert load(away).deepspeed_config["zero_optimization"] == away["zero_optimization"]


def test_the_students_type_is_said_once(load, refusal, tmp_path):
    theirs = {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}
    config = load(theirs)
    assert "data_types" not in config.deepspeed_config
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again, ["student.dtype=float32"]).student.dtype == "float32"
    theirs["data_types"]["param_dtype"] = "fp32"
    assert refusal(theirs) == (
        f"{tmp_path}/ds.json:6: data_types.param_dtype is 'fp32', but student.dtype is 'bfloat16' "
        f"({tmp_path}/ds.json:3): they are one setting; make them agree or leave one out"
    )


def engine(dtype="bfloat16", stage=0, **training):
    """Our side of a run with DeepSpeed's engine."""
    return {
        "student": {"dtype": dtype},
        "parallel": {"engine": "deepspeed", "shard": "zero2" if stage else "none"},
        "training": training,
    }


NORM = {"zero_optimization": {"compute_grad_norm": False}}
UNTESTED = {"zero_allow_untested_optimizer": False}
ACCUMULATION = "data_types.grad_accum_dtype"


def accumulating(dtype, stage=None):
    zero = {} if stage is None else {"zero_optimization": {"stage": stage}}
    return {"data_types": {"grad_accum_dtype": dtype}} | zero


@pytest.mark.parametrize(
    ("theirs", "ours", "line", "message"),
    [
        (NORM, engine(), 3, "zero_optimization.compute_grad_norm is false, which DeepSpeed has"),
        (
            UNTESTED,
            engine(stage=2, optimizer="sgd"),
            2,
            "zero_allow_untested_optimizer is false, with which DeepSpeed refuses "
            "training.optimizer sgd at stage 2: leave",
        ),
        (
            {"communication_data_type": "FP16"},
            engine(),
            2,
            "communication_data_type must be fp32 or bf16, got 'FP16': there is no loss scale",
        ),
        (
            {"communication_data_type": "float32"},
            engine("float32"),
            2,
            "communication_data_type must be fp32 or bf16, got 'float32'",
        ),
        (accumulating("fp32"), engine(), 3, f"{ACCUMULATION} must be bfloat16 with a bfloat16 st"),
        (accumulating("fp32", 1), engine(stage=1), 3, f"{ACCUMULATION} must be bfloat16 with a"),
        (accumulating("fp16"), engine(stage=2), 3, f"{ACCUMULATION} must be bfloat16 or float32"),
        (accumulating(3), engine(stage=2), 3, f"{ACCUMULATION} must be bfloat16 or float32"),
        (accumulating("bf16"), engine("float32"), 3, f"{ACCUMULATION} must be float32 with a fl"),
    ],
)
def test_what_would_end_or_lose_gradients_with_deepspeeds_engine(
    load, refusal, tmp_path, theirs, ours, line, message
):
    assert refusal(theirs, ours).startswith(f"{tmp_path}/ds.json:{line}: {message}")
    # nothing of it is read with the other one
    torch_engine = ours | {"parallel": {"shard": ours["parallel"]["shard"]}}
    load(theirs, torch_engine)


@pytest.mark.parametrize(
    ("theirs", "ours", "notice"),
    [
        (
            {"communication_data_type": "bf16"},
            engine("float32"),
            "communication_data_type 'bf16': gradients are rounded to bfloat16 and summed so over",
        ),
        (
            accumulating("bfloat16"),
            engine(stage=2),
            f"{ACCUMULATION} 'bfloat16': gradients of micro-batches add up in bfloat16; left out",
        ),
        ({"communication_data_type": "fp32"}, engine(), ""),
        (accumulating("fp32"), engine(stage=2), ""),
        (accumulating("torch.float32"), engine("float32"), ""),
        (accumulating("bfloat16", 1), engine(stage=1), ""),
        (accumulating("bf16"), engine(), ""),
        (NORM, engine(stage=2), ""),
        (UNTESTED, engine(stage=2), ""),
        (UNTESTED, engine(optimizer="sgd"), ""),
    ],
)
def test_what_rounds_gradients_is_told_and_what_does_not_is_passed_on(
    load, warned, theirs, ours, notice
):
    config = load(theirs | {"gradient_clipping": 1.0}, ours)
    for key, value in theirs.items():
        held = config.deepspeed_config[key]
        assert held == (value if not isinstance(value, dict) else held | value)
    assert [line.startswith(notice) for line in warned.messages] == [True] * bool(notice)
    complete(config.for_world(1), Layout())


def test_autotp_cuts_where_its_size_is_given(load, refusal, warned, tmp_path):
    sized = {"tensor_parallel": {"autotp_size": 2}}
    deepspeed = {"parallel": {"engine": "deepspeed"}}
    assert load(sized).parallel.tp_by == "plan"
    config = load(sized, deepspeed)
    assert (config.parallel.tp, config.parallel.tp_by) == (2, "autotp")
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert load_config(again, ["parallel.tp_by=plan"]).parallel.tp_by == "plan"
    # ours alone, and ours against theirs
    assert load({}, {"parallel": {"engine": "deepspeed", "tp": 2}}).parallel.tp_by == "plan"
    ours = {"parallel": {"engine": "deepspeed", "tp_by": "plan"}}
    assert load(sized, ours).parallel.tp_by == "plan"
    assert load({"tensor_parallel": {"autotp_size": 1}}, deepspeed).parallel.tp_by == "plan"
    torch_engine = refusal(sized, {"parallel": {"tp_by": "autotp"}})
    assert "parallel.tp_by is autotp, which is for parallel.engine deepspeed" in torch_engine
    whole = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False}}
    both = deepspeed | {"distillation": {"loss_backend": "dense"}}
    assert "distillation.loss_backend is dense, which keeps whole heads, but" in refusal(
        whole, both
    )
    assert load(whole, both | ours).parallel.tp_by == "plan"


def test_autotps_own_plans(load, refusal, warned):
    theirs = {"tensor_parallel": {"autotp_size": 2, "preset_model": "qwen2", "dtype": "bf16"}}
    assert load(theirs).deepspeed_config["tensor_parallel"] == {
        "autotp_size": 2,
        "vocab_parallel_lm_head": True,
    }
    assert (
        "tensor_parallel.preset_model, tensor_parallel.dtype: not used, models are cut by the plan"
        in warned.text
    )
    ours = {"parallel": {"engine": "deepspeed"}}
    assert "tensor_parallel.preset_model is not supported: AutoTP cuts by" in refusal(theirs, ours)
    load(theirs, {"parallel": {"engine": "deepspeed", "tp_by": "plan"}})


def test_the_torch_engine_names_what_it_does_not_read(load, warned):
    load({"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 5})
    assert "parallel.engine is torch" in warned.text
    assert (
        "not for zero_optimization.overlap_comm, steps_per_print; parallel.engine=deep"
        in warned.text
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_resolved_configuration_is_read_back(load, tmp_path, stage):
    theirs = {
        **ZERO2,
        "zero_optimization": {"stage": stage, "sub_group_size": 5},
        "tensor_parallel": {"autotp_size": 2},
    }
    config = load({key: theirs[key] for key in theirs if key != "train_batch_size"}).for_world(4)
    assert config.deepspeed_config["zero_optimization"] == {"stage": stage, "sub_group_size": 5}
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert config.flat()["deepspeed_config"] == yaml.safe_load(config.dump())["deepspeed_config"]
    # each setting is written once, so that it can be changed in one place
    changed = load_config(again, ["training.max_grad_norm=0.125", "parallel.tp=1"])
    assert changed.deepspeed_config["gradient_clipping"] == 0.125
    assert "autotp_size" not in changed.deepspeed_config.get("tensor_parallel", {})


_KEYS = sorted(READ | PASSED | {item.key for item in REFUSALS if "." not in item.key})
_INNER = sorted({key for known in KNOWN.values() for key in known})
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 5),
    st.floats(),
    st.sampled_from(["auto", "AdamW", "WarmupLR", "1e-3", ""]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.one_of(st.sampled_from(_INNER), st.integers(0, 1)), inner, max_size=3),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(theirs=st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=3))
def test_whatever_stands_there_is_read_or_told_in_one_line(theirs, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(BASE | {"deepspeed_config": theirs}, sort_keys=False))
    told = ""
    try:
        config = load_config(path)
        path.write_text(config.dump())
        assert load_config(path) == config
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told


def test_a_key_that_is_a_number(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE) + "deepspeed_config: {bf16: {1: 2}}\n")
    with pytest.raises(ConfigError, match=r"deepspeed_config\.bf16\.1 is not a key that is known"):
        load_config(path)


def test_a_mapping_that_holds_itself(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE) + "deepspeed_config: &a\n  aio: *a\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:7: deepspeed_config is nested too deeply"):
        load_config(path)
