import sys

import pytest

from vocabtp.opsd import cli, doctor


def test_two_ranks_add_up():
    assert doctor.two_ranks()[0] == ""


def test_rank_that_fails_is_named(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho noise >&2\necho 'OSError: no interface' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert doctor.two_ranks()[0] == "[rank 0] OSError: no interface"


def test_rank_that_hangs_is_ended(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    problem, seconds = doctor.two_ranks(limit_s=0.5)
    assert problem == "[rank 0] no answer within 0 s"
    assert seconds < 10


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("[rank 1] broken", 1)])
def test_output_and_exit_code(monkeypatch, capsys, problem, code):
    monkeypatch.setattr(doctor, "two_ranks", lambda: (problem, 0.5))
    assert cli.run(["doctor"]) == code
    out = capsys.readouterr().out
    for part in ("torch: ", "transformers: ", "accelerators: ", "communication: gloo"):
        assert part in out
    assert ("FAILED: [rank 1] broken" in out) is bool(problem)


def test_configuration_and_prompts_are_checked_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "two_ranks", lambda: ("", 0.5))
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model_name_or_path: a/b}\nteacher: {model_name_or_path: a/c}\n"
        "data: {path: p.jsonl}\n"
    )
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert cli.run(["doctor", str(path)]) == 0
    assert f"{path}: ok, 2 prompts" in capsys.readouterr().out
    assert cli.run(["doctor", str(path), "training.sed=1"]) == 2
    assert "unknown key training.sed" in capsys.readouterr().err
