"""The DeepSpeedExamples OPSD application's files, read unchanged or refused by key."""

import json

import pytest
import yaml

from deepspeed_files import ZERO2
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError

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
