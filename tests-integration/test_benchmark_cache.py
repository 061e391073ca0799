"""benchmarks/cache.py measures what it names, here in small, and tables say what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import cache as benchmark  # noqa: E402


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("cache") / "a/b.json"
    benchmark.main(["--device=cpu", "--quick", f"--out={out}", "--commit=abc"])
    return out


def test_every_part_is_measured(path):
    file = json.loads(path.read_text())
    assert (file["schema"], file["run"]["device"], file["run"]["commit"]) == (1, "cpu", "abc")
    assert set(file["run"]["seconds"]) == set(benchmark.PARTS)
    found = {}
    for row in file["results"]:
        found.setdefault(row["part"], []).append(row)
    for row in found["fetch"] + found["store"] + found["step"]:
        assert row["ms"] > 0
    # four ways, two layouts, two widths, and the bytes of the whole chunks
    assert len(found["fetch"]) == 16
    assert {tuple(r["chunk"]): r["bytes"] for r in found["fetch"]} == {
        (16, 96): 2 * 16 * 96 * 2,
        (2, 8, 96): 2 * 16 * 96 * 2,
        (16, 128): 2 * 16 * 128 * 2,
        (2, 8, 128): 2 * 16 * 128 * 2,
    }
    assert len(found["store"]) == 12
    for row in found["store"]:
        if row["arm"] != "contiguous pinned":
            assert row["host_bytes"] == row["bytes"] <= row["pool_bytes"]
            assert row["held_ms"] > 0
    arms = [row["arm"] for row in found["step"]]
    assert arms[-4:] == [*(f"cache, budget {n}" for n in (6144, 3072, 0)), "store and cache"]
    plain = next(row["ms"] for row in found["step"] if row["arm"] == "on the device")
    for row in found["step"]:
        if "hidden" in row:
            assert row["hidden"] == pytest.approx(1 - (row["ms"] - plain) / row["copy_ms"])
    assert [(r["arm"], r["width"], r["row_bytes"]) for r in found["hidden"]] == [
        ("logits", 16, 192),
        ("hidden", 16, 32),
        ("logits", 32, 192),
        ("hidden", 32, 64),
    ]
    for row in found["hidden"]:
        if row["arm"] == "hidden":
            assert row["relative"] <= 2.0**-7
            assert abs(row["kl"]) < 1e-4
    pool = found["locked"][-1]
    assert (pool["arm"], pool["steps"], len(pool["held"])) == ("PinnedPool", 40, 40)
    assert all(held >= most for held, most in zip(pool["held"], pool["largest"], strict=True))
    assert pool["held"] == sorted(pool["held"])


def test_some_parts_alone(tmp_path, capsys):
    benchmark.main(["--device=cpu", "--quick", "--parts=locked", f"--out={tmp_path}/a.json"])
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {row["part"] for row in results} == {"locked"}
    with pytest.raises(SystemExit):
        benchmark.main(["--parts=fetch,stor"])
    assert "--parts: no stor; there are fetch, store, step" in capsys.readouterr().err


def test_tables_are_made_from_the_file(path, tmp_path):
    file = json.loads(path.read_text())
    for row in file["results"]:
        # numbers that can be told apart
        if row["part"] == "fetch":
            row |= {"ms": 5.6, "gb_s": 55.04, "of_contiguous": 0.985}
        elif row["part"] == "step" and row["arm"].startswith("cache"):
            row |= {"ms": 151.23, "copy_ms": 22.6, "hidden": 0.934}
    (tmp_path / "r.json").write_text(json.dumps(file))
    (tmp_path / "cache.md").write_text((ROOT / "docs/cache.md").read_text())
    benchmark.main([f"--docs={tmp_path}", str(tmp_path / "r.json")])
    made = (tmp_path / "cache.md").read_text()
    drawn = (tmp_path / "assets/cache/locked.svg").read_bytes()
    assert "| [2, 8, 96] | `fetch` | 2.80 | 55.0 | 98.5% |" in made
    assert "| in the cache, at most 50% ahead | 151.2 | 22.6 | 93.4% |" in made
    assert "| 16 | 32 / 192 | " in made
    assert "![Locked memory over steps of random lengths](assets/cache/locked.svg)" in made
    assert b"largest payload so far" in drawn
    benchmark.main([f"--docs={tmp_path}", str(tmp_path / "r.json")])
    assert (tmp_path / "cache.md").read_text() == made
    assert (tmp_path / "assets/cache/locked.svg").read_bytes() == drawn
