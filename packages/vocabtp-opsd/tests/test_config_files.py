"""Configuration files that are broken, or hold what no parser or file system can take."""

import json

import pytest
import yaml

from config_files import BASE, refusal
from vocabtp.opsd.config import load_config


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_key_set_twice_names_both_lines(write_config, name):
    if name == "run.json":
        text = '{"training": {\n\t"seed": 1,\n\t"seed": 2}}'
        path = write_config(name=name, base=text)
        expected = f"{path}:3: training.seed is set twice, first on line 2"
    else:
        path = write_config("training:\n  seed: 1\n  logging_steps: 3\n  seed: 2\n")
        expected = f"{path}:10: training.seed is set twice, first on line 8"
    assert refusal(path) == expected


def test_section_set_twice_is_refused(write_config):
    assert "data is set twice, first on line 5" in refusal(write_config("data:\n  shuffle: true\n"))


def test_numeric_strings_are_floats_as_yaml_writes_them(write_config):
    config = load_config(
        write_config("training:\n  learning_rate: 1e-5\n  adam_betas: [9e-1, .95]\n")
    )
    assert config.training.learning_rate == 1e-5
    assert config.training.adam_betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the configuration is empty"),
        ("# only a comment\n", "the configuration is empty"),
        ("- a\n- b\n", "a configuration is a mapping of sections"),
        ("training: [a\n", "not valid YAML"),
        ("training:\n\tseed: 1\n", ":2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("training: *seed\n", ":1: not valid YAML"),
        ("training: !!python/object:os.system {}\n", ":1: not valid YAML"),
        ("1: 2\n", ":1: a key must be a name: 1"),
        ("? [a]\n: 1\n", ":1: a key must be a name: a list or mapping"),
        ("a: \x07\n", "not valid YAML"),
    ],
)
def test_broken_file_is_one_line(write_config, text, message):
    path = write_config(base=text)
    told = refusal(path)
    assert told.startswith(str(path))
    assert message in told


def test_broken_json_names_the_line(write_config):
    path = write_config(base='{"training": {\n  "seed": 1,\n}}', name="run.json")
    assert refusal(path).startswith(f"{path}:3: not valid JSON")


def test_unreadable_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "Is a directory" in refusal(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"training: {save_dir: \xe9}")
    assert refusal(path) == f"{path}: not UTF-8 text (byte 21)"


def test_byte_order_mark_and_tabbed_json_are_read(tmp_path):
    values = yaml.safe_load(BASE)
    values["data"]["prompt_field"] = "\U0001f600"
    path = tmp_path / "run.json"
    path.write_text("\ufeff" + json.dumps(values, indent="\t"), encoding="utf-8")
    assert load_config(path).data.prompt_field == "\U0001f600"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("2020-13-45", "no timestamp"),
        ("!!timestamp abc", "no timestamp"),
        ("!!int abc", "no int"),
        ("!!float abc", "no float"),
        ("!!bool abc", "no bool"),
        ("9" * 5000, "no int"),
    ],
)
def test_value_that_yaml_cannot_make_names_the_line(write_config, value, problem):
    path = write_config(f"training:\n  max_steps: 3\n  seed: {value}\n")
    text = refusal(path)
    assert f"{path}:9: not valid YAML" in text
    assert problem in text
    assert "quote it" in refusal(write_config(), [f"training.seed={value}"])


def test_numbers_and_nesting_beyond_the_parsers(write_config):
    path = write_config('{"training": {"seed": ' + "9" * 5000 + "}}", name="run.json", base="")
    assert "too many digits" in refusal(path)
    assert "quote it" in refusal(write_config(), ["training.seed=" + "[" * 2000])


@pytest.mark.parametrize("text", ["\\0", "\\ud800"])
@pytest.mark.parametrize(
    "key", ["data.path", "data.chat_template", "training.save_dir", "student.model_name_or_path"]
)
def test_text_that_no_file_can_hold_is_refused(write_config, key, text):
    section, name = key.split(".")
    values = yaml.safe_load(BASE)
    values.setdefault(section, {})[name] = "HERE"
    body = json.dumps(values).replace("HERE", "a" + text.replace("\\0", "\\u0000") + "b")
    path = write_config(body, name="run.json", base="")
    assert f"{path}:1: {key} must be a text without NUL" in refusal(path)
