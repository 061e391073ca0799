"""What makes a directory no whole checkpoint, however its files are damaged."""

import json

import pytest

from vocabtp.opsd.checkpoint_files import fault
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import UserError
from vocabtp.opsd.output import Output


@pytest.fixture
def checkpoint(tmp_path):
    """A directory that passes for a checkpoint."""
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    files = {"state.json": json.dumps({"step": 4}), ".metadata": "m", "__0_0.distcp": "tensors"}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "COMPLETE").write_text(json.dumps({name: len(t) for name, t in files.items()}))
    assert fault(folder) == ""
    return folder


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "{}", '{"state.json": 11}', "\0\0"])
def test_complete_without_a_list_of_files(checkpoint, text):
    (checkpoint / "COMPLETE").write_text(text)
    assert "COMPLETE" in fault(checkpoint)


@pytest.mark.parametrize("text", ["\0" * 11, "[1,2,3,4,5]", '{"stop": 4}', "{}         "])
def test_state_of_the_right_size_that_says_nothing(checkpoint, text):
    assert len(text) == 11
    (checkpoint / "state.json").write_text(text)
    assert "state.json cannot be read" in fault(checkpoint)


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "config.yaml"])
def test_output_that_cannot_be_written_is_one_line(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model_name_or_path: a/b}\nteacher: {model_name_or_path: a/c}\n"
        f"data: {{path: p.jsonl}}\ntraining: {{save_dir: {tmp_path}/out}}\n"
    )
    blocked = tmp_path / "out" / name
    blocked.parent.mkdir()
    blocked.write_text("") if name == "tensorboard" else blocked.mkdir()
    with pytest.raises(
        UserError, match=r"^training\.save_dir: .*exist|^training\.save_dir: .*direc"
    ):
        Output(load_config(path), is_main=True, total=3, done=2)
