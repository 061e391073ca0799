"""What a configuration becomes: defaults, paths, batch sizes, and the whole of it again."""

import json
import logging

import pytest
import yaml

from config_files import BASE, refusal
from vocabtp.opsd.config import Config, load_config, reference
from vocabtp.opsd.errors import ConfigError


def test_defaults_are_the_documented_ones(write_config):
    config = load_config(write_config())
    assert config.rollout.model_dump() == {
        "max_prompt_length": 1024,
        "max_response_length": 1024,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "n_samples_per_prompt": 1,
        "engine": "local",
    }
    assert config.distillation.loss_type == "reverse_kl"
    assert config.distillation.temperature_squared is True
    assert config.student.dtype == "bfloat16"
    assert (config.parallel.tp, config.parallel.nproc) == (1, None)


def test_configuration_is_frozen(write_config):
    config = load_config(write_config())
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3


def test_section_without_keys_is_all_defaults(write_config):
    assert load_config(write_config("rollout:\n")).rollout == load_config(write_config()).rollout


class TestPaths:
    def test_beside_the_file_before_the_working_directory(
        self, write_config, tmp_path, monkeypatch
    ):
        elsewhere = tmp_path / "cwd"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        path = write_config()
        (elsewhere / "prompts.jsonl").touch()
        assert load_config(path).data.path == str(elsewhere / "prompts.jsonl")
        (tmp_path / "prompts.jsonl").touch()
        assert load_config(path).data.path == str(tmp_path / "prompts.jsonl")
        override = ["data.path=prompts.jsonl"]
        assert load_config(path, override).data.path == str(elsewhere / "prompts.jsonl")

    def test_a_word_is_no_path_though_there_is_a_file_of_that_name(
        self, write_config, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        given = {
            "teacher.payload": "hidden",
            "parallel.engine": "torch",
            "student.dtype": "float32",
        }
        for word in given.values():
            (tmp_path / word).mkdir()
        config = load_config(write_config(), [f"{key}={word}" for key, word in given.items()])
        assert config.teacher.payload == "hidden"
        assert (config.parallel.engine, config.student.dtype) == ("torch", "float32")

    def test_model_directory_or_hub_name(self, write_config, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        path = write_config()
        assert load_config(path).student.model_name_or_path == "org/student"
        (tmp_path / "org/student").mkdir(parents=True)
        assert load_config(path).student.model_name_or_path == str(tmp_path / "org/student")

    @pytest.mark.parametrize("name", ["./student", "models/a/b", "/no/such/model"])
    def test_model_that_is_neither_is_refused(self, write_config, name):
        text = refusal(write_config(base=BASE.replace("org/student", name)))
        assert f":2: student.model_name_or_path: no directory '{name}'" in text

    def test_template_text_is_left_alone(self, write_config):
        template = "{% for m in messages %}" + "x" * 5000
        config = load_config(write_config(), [f"data.chat_template='{template}'"])
        assert config.data.chat_template == template


class TestBatch:
    @pytest.mark.parametrize(
        ("train", "micro", "steps", "expected"),
        [
            (None, None, None, (8, 1, 4)),
            (8, 2, None, (8, 2, 2)),
            (8, None, 2, (8, 2, 2)),
            (None, 2, 2, (8, 2, 2)),
            (8, 2, 2, (8, 2, 2)),
            (None, 3, None, (6, 3, 1)),
            (None, None, 3, (6, 1, 3)),
            (4, None, None, (4, 1, 2)),
        ],
    )
    def test_what_is_left_out_is_derived(self, write_config, train, micro, steps, expected):
        keys = ("train_batch_size", "micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = zip(keys, (train, micro, steps), strict=True)
        overrides = [f"training.{k}={v}" for k, v in given if v is not None]
        config = load_config(write_config(), [*overrides, "parallel.tp=2"]).for_world(4)
        assert tuple(getattr(config.training, k) for k in keys) == expected
        assert config.for_world(4) == config

    def test_samples_per_prompt_count(self, write_config):
        extra = ["rollout.n_samples_per_prompt=4", "rollout.temperature=1"]
        config = load_config(write_config(), ["training.train_batch_size=2", *extra]).for_world(2)
        assert config.training.gradient_accumulation_steps == 4

    @pytest.mark.parametrize(
        "sizes", [(8, 3, 2), (8, 16, None), (7, 1, None), (8, None, 3), (8, 2, 2)]
    )
    def test_contradiction_names_the_numbers(self, write_config, sizes):
        keys = ("train_batch_size", "micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = zip(keys, sizes, strict=True)
        overrides = [f"training.{k}={v}" for k, v in given if v is not None]
        with pytest.raises(ConfigError) as caught:
            load_config(write_config(), overrides).for_world(4 if sizes == (8, 2, 2) else 2)
        for key, size in zip(keys, sizes, strict=True):
            if size is not None:
                assert f"{key} {size}" in str(caught.value)

    def test_tp_has_to_divide_the_ranks(self, write_config):
        with pytest.raises(ConfigError, match=r"parallel\.tp is 2, but the run has 3"):
            load_config(write_config(), ["parallel.tp=2"]).for_world(3)


# what a key needs beside it, and a value that is not its default where the rule is not enough
COMPANIONS = {
    "parallel.teacher_shard": ["parallel.engine=deepspeed"],
    "parallel.tp_by": ["parallel.engine=deepspeed"],
    "rollout.n_samples_per_prompt": ["rollout.temperature=1"],
    "distillation.beta": ["distillation.loss_type=jsd"],
    "distillation.rescale": ["distillation.loss_type=jsd"],
    "training.eval_steps": ["data.eval_path=held.jsonl"],
}
OTHER = {
    "rollout.top_p": 0.5,
    "rollout.temperature": 0.25,
    "distillation.beta": 0.25,
    "training.max_steps": 7,
    "training.adam_betas": [0.5, 0.625],
    "data.chat_template": "tokenizer",
    "deepspeed_config": {"steps_per_print": 7},
}


def other_value(row):
    name = f"{row.section}.{row.key}".lstrip(".")
    if name in OTHER:
        return OTHER[name]
    if row.allowed and row.type == "string" and "not empty" not in row.allowed:
        choices = row.allowed.split(", ")
        return next((c for c in choices if c != row.default), None)
    return {
        "string": "something",
        "string or null": "something",
        "int": 3,
        "int or null": 3,
        "float": 0.125,
        "float or null": 0.125,
        "bool": row.default == "false",
    }[row.type]


def test_every_documented_key_reaches_the_resolved_configuration(write_config):
    """B55: a key that is declared and never wired would not show."""
    single = set()
    for row in reference():
        name = f"{row.section}.{row.key}".lstrip(".")
        value = other_value(row)
        if value is None:
            single.add(name)
            continue
        overrides = [*COMPANIONS.get(name, []), f"{name}={json.dumps(value)}"]
        config = load_config(write_config(), overrides)
        shown = yaml.safe_load(config.dump())
        found = shown[row.section][row.key] if row.section else shown[row.key]
        assert found == value, name
        assert config.flat()[name] == value
        assert str(value) != row.default
    # keys with one value so far: nothing to change them to
    assert single == {"teacher.kind", "rollout.engine"}


def test_reference_covers_every_field_with_a_description():
    rows = reference()
    fields = {
        f"{name}.{key}"
        for name in ("student", "teacher", "rollout")
        for key in Config.model_fields[name].annotation.model_fields
    }
    assert fields <= {f"{r.section}.{r.key}" for r in rows}
    assert all(len(r.description) > 10 and r.description.endswith((".", ")")) for r in rows)
    seed = next(r for r in rows if r.key == "seed")
    assert (seed.section, seed.type, seed.default, seed.allowed.split(",")[0]) == (
        "training",
        "int",
        "42",
        ">= 0",
    )
    betas = next(r for r in rows if r.key == "adam_betas")
    assert (betas.type, betas.default, betas.allowed) == (
        "[float, float]",
        "[0.9, 0.999]",
        ">= 0, < 1",
    )


def test_dump_is_read_back_to_an_equal_configuration(write_config, tmp_path):
    overrides = ["distillation.loss_type=jsd", "distillation.beta=1e-3", "parallel.tp=2"]
    config = load_config(write_config(), overrides).for_world(2)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(), encoding="utf-8")
    assert load_config(again) == config


def test_settings_without_effect_are_noticed(write_config, caplog):
    with caplog.at_level(logging.WARNING, logger="vocabtp.opsd"):
        load_config(
            write_config(), ["rollout.top_k=3", "training.max_steps=4", "training.warmup_steps=4"]
        )
    assert "no effect with rollout.temperature 0" in caplog.text
    assert "never reaches its peak" in caplog.text
