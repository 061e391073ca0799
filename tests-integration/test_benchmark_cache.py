"""benchmarks/cache.py measures what it names, here in small, and tables say what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import cache as benchmark  # noqa: E402
import cache_parts  # noqa: E402
import cache_step  # noqa: E402


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
    assert arms == [
        *("on the device", "on the device, again"),
        *(f"cache, budget {n}" for n in (6144, 3072, 0)),
        "store and cache",
        # those that leave the chip idle behind all others
        *("forward alone", "copies to the device alone", "copies both ways alone"),
    ]
    for row in found["step"]:
        assert row["range_ms"][0] <= row["ms"] <= row["range_ms"][1]
        assert row["queued"] == 2
        if "hidden" in row:
            assert row["hidden_range"][0] <= row["hidden"] <= row["hidden_range"][1]
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


def test_what_is_hidden_is_of_what_is_there_to_hide():
    """Of each round: rounds may be slow as a whole."""
    found = {
        "on the device": [100.0, 200.0, 100.0],
        "cache, budget 0": [120.0, 220.0, 110.0],
        "cache, budget 9": [102.0, 201.0, 104.0],
        "copies to the device alone": [21.0, 21.0, 21.0],
        "copies both ways alone": [51.0, 51.0, 51.0],
        "store and cache": [105.0, 210.0, 120.0],
    }
    one, both = (cache_step._hidden(found, arm) for arm in ("cache, budget 9", "store and cache"))
    assert one == pytest.approx(
        {"exposed_ms": 20.0, "hidden": 0.9, "hidden_range": pytest.approx([0.6, 0.95])}
    )
    assert both == pytest.approx(
        {"exposed_ms": 50.0, "hidden": 0.8, "hidden_range": pytest.approx([0.5, 0.9])}
    )


def test_a_sample_is_the_mean_of_calls_in_a_row(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("cache_parts.time.perf_counter", lambda: next(clock) / 1e3)
    calls = []
    arms = {"a": lambda: calls.append("a"), "b": lambda: (next(clock), calls.append("b"))}
    found = cache_parts.samples(arms, torch.device("cpu"), rounds=2, times=3)
    # one tick a sample, and three more in b
    assert found == {"a": [pytest.approx(1 / 3)] * 2, "b": [pytest.approx(4 / 3)] * 2}
    assert calls == ["a"] * 3 + ["b"] * 3 + (["a"] * 3 + ["b"] * 3) * 2
    # all arms come after the same
    calls.clear()
    before = lambda: (next(clock), calls.append("-"))  # noqa: E731
    again = cache_parts.samples(arms, torch.device("cpu"), rounds=1, times=2, before=before)
    assert again == {"a": [pytest.approx(1 / 2)], "b": [pytest.approx(3 / 2)]}
    assert calls == [*"--aa--bb"] * 2


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
            row |= {"ms": 151.23, "range_ms": [150.7, 153.04], "copy_ms": 22.6}
            row |= {"exposed_ms": 21.5, "hidden": 0.934, "hidden_range": [0.92, 0.951]}
    (tmp_path / "r.json").write_text(json.dumps(file))
    (tmp_path / "cache.md").write_text((ROOT / "docs/cache.md").read_text())
    benchmark.main([f"--docs={tmp_path}", str(tmp_path / "r.json")])
    made = (tmp_path / "cache.md").read_text()
    drawn = (tmp_path / "assets/cache/locked.svg").read_bytes()
    assert "| [2, 8, 96] | `fetch` | 2.80 | 55.0 | 98.5% |" in made
    row = "151.2 | 150.7 to 153.0 | 22.6 | 21.5 | 93.4% (92.0% to 95.1%) |"
    assert f"| in the cache, at most 50% ahead | {row}" in made
    assert "| 16 | 32 / 192 | " in made
    assert "![Locked memory over steps of random lengths](assets/cache/locked.svg)" in made
    assert b"largest payload so far" in drawn
    benchmark.main([f"--docs={tmp_path}", str(tmp_path / "r.json")])
    assert (tmp_path / "cache.md").read_text() == made
    assert (tmp_path / "assets/cache/locked.svg").read_bytes() == drawn


def test_the_page_holds_what_the_result_makes(tmp_path):
    page = (ROOT / "docs/cache.md").read_text()
    (tmp_path / "cache.md").write_text(page)
    benchmark.main([f"--docs={tmp_path}", str(ROOT / "benchmarks/results/cache/h200.json")])
    assert (tmp_path / "cache.md").read_text() == page
