"""The benchmark measures what it says, and refuses to time a wrong answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIELDS = {
    *("schema", "op", "provider", "mode", "dtype", "rows", "vocab", "world"),
    *("median_ms", "p20_ms", "p80_ms", "gb_per_s", "peak_mib"),
    *("device", "torch", "triton", "package_versions", "commit", "date"),
}
SMALL = ["--rows=8", "--vocab=300", "--repeats=3"]


def run(folder: Path, *args: str, patch: str = "") -> subprocess.CompletedProcess[str]:
    """benchmarks/run.py in a process of its own, after an optional change to it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import run, cases\n"
    code += f"{patch}\nrun.main(sys.argv[1:])"
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code, "--device=cpu", *SMALL, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_op_and_arm_is_measured(tmp_path, dtype):
    providers = "vocabtp,dense,vocabtp-eager"
    done = run(tmp_path, f"--dtype={dtype}", f"--providers={providers}", "--out=a/b.jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "a/b.jsonl").read_text().splitlines()]
    assert len(rows) == 5 * 2 * 3
    assert len({(r["op"], r["mode"], r["provider"]) for r in rows}) == len(rows)
    for row in rows:
        assert set(row) == FIELDS
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert (row["rows"], row["vocab"], row["dtype"]) == (8, 300, dtype)
    entropy = next(r for r in rows if (r["op"], r["mode"]) == ("entropy", "both"))
    size = 3 * 8 * 300 * (4 if dtype == "float32" else 2)
    assert entropy["gb_per_s"] == pytest.approx(size / entropy["median_ms"] / 1e6, abs=0.02)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("lambda x: 1.001 * cases.dense_entropy(x)", "entropy dense: values are off by"),
        (
            "lambda x: cases.dense_entropy(x).detach() + 0 * x.sum(-1)",
            "entropy dense: gradients are off by",
        ),
        ("lambda x: cases.dense_entropy(x) * float('nan')", "entropy dense: values are off by nan"),
    ],
)
def test_a_wrong_arm_is_not_timed(tmp_path, wrong, complaint):
    patch = "import dataclasses\n" + (
        f"cases.CASES['entropy'] = dataclasses.replace(cases.CASES['entropy'], dense={wrong})"
    )
    done = run(tmp_path, "--ops=entropy", patch=patch)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "median" not in (tmp_path / "runs/bench.jsonl").read_text()
