"""What several of these tests use."""

import json
import logging

import pytest
import yaml

from config_files import BASE
from deepspeed_files import RUN
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError


@pytest.fixture
def write_config(tmp_path):
    """Writes a file of `base` and `extra`, a whole configuration if nothing else is said."""

    def call(extra="", name="run.yaml", base=BASE):
        path = tmp_path / name
        path.write_text(base + extra, encoding="utf-8")
        return path

    return call


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, logger="vocabtp.opsd")
    return caplog


@pytest.fixture
def load_theirs(tmp_path):
    """Loads RUN with sections of `ours` and a DeepSpeed file of `theirs`."""

    def call(theirs, ours=None, overrides=()):
        values = {key: dict(value) for key, value in RUN.items()}
        for section, keys in (ours or {}).items():
            values.setdefault(section, {}).update(keys)
        values["deepspeed_config"] = "ds.json"
        (tmp_path / "ds.json").write_text(json.dumps(theirs, indent=1))
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return load_config(path, overrides)

    return call


@pytest.fixture
def refusal_of_theirs(load_theirs):
    """Why `load_theirs` refuses, in one line."""

    def call(*args):
        with pytest.raises(ConfigError) as caught:
            load_theirs(*args)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return call
