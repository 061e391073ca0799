"""benchmarks/opsd.py runs what it names, here in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import opsd as benchmark

SMALL = ["--device=cpu", "--quick", "--steps=6", "--prompt=24", "--answer=5", "--batch=2"]


def test_medians_leave_out_the_first_steps():
    steps = [{"seconds": 1.0 + 10 * (i < 4), "seconds_student": 0.5, "loss": i} for i in range(9)]
    rest = {"response_tokens": 8, "applied": True, "peak_memory": [2**30, 3 << 30], "grad_norm": 1}
    args = type("Args", (), {"prompt": 20, "batch": 2, "ranks": 2})
    found = benchmark.summary([step | rest for step in steps], args)
    assert found["seconds"] == 1.0
    assert found["first_step_s"] == 11.0
    assert found["seconds_by_phase"] == {"student": 0.5}
    assert found["peak_gib"] == 3.0
    assert (found["answer_tokens_per_s"], found["sequence_tokens_per_s"]) == (8.0, 88.0)
    assert found["losses"] == [0, 8]


@pytest.mark.full
def test_runs_and_failures_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.MODES, "wrong", (1, ["training.max_steps=0"]))
    out = tmp_path / "out.json"
    folder = ["--folder", str(tmp_path / "runs"), "--out", str(out)]
    benchmark.main([*SMALL, *folder, "--modes=torch,checkpointing,wrong"])
    told = json.loads(out.read_text())
    assert told["run"]["device"] == "cpu"
    found = {result["mode"]: result for result in told["results"]}
    for mode in ("torch", "checkpointing"):
        assert found[mode]["status"] == "ok"
        assert found[mode]["steps"] == found[mode]["applied"] == 6
        assert set(found[mode]["seconds_by_phase"]) >= {"rollout", "teacher", "student", "step"}
    assert found["torch"]["losses"] == pytest.approx(found["checkpointing"]["losses"], rel=1e-6)
    assert found["wrong"]["status"] == "failed"
    assert "training.max_steps" in " ".join(found["wrong"]["why"])
    # what a run writes is large
    assert not list((tmp_path / "runs").glob("out-*"))
    assert "wrong" in capsys.readouterr().out


def test_an_unknown_mode_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*SMALL, "--modes=torch,nothing"])
    assert "no nothing; there are torch, checkpointing" in capsys.readouterr().err


def test_what_was_measured_becomes_a_page(tmp_path, capsys):
    root = Path(__file__).parents[1]
    page = tmp_path / "training-runs.md"
    page.write_text((root / "docs" / "training-runs.md").read_text(encoding="utf-8"))
    files = sorted(map(str, (root / "benchmarks" / "results" / "opsd").glob("*.json")))
    benchmark.main(["--docs", str(tmp_path), *files])
    made = page.read_text(encoding="utf-8")
    # the page is what the files make of it
    assert made == (root / "docs" / "training-runs.md").read_text(encoding="utf-8")
    assert "| torch engine | 1 |" in made
    with pytest.raises(SystemExit):
        benchmark.main(files)
    assert "--docs" in capsys.readouterr().err
