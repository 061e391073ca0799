"""The benchmark measures what it says, and shows a wrong answer as wrong."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = str(ROOT / "benchmarks")
sys.path.append(BENCHMARKS)

import accuracy  # noqa: E402
import arms  # noqa: E402
import cases  # noqa: E402
import ops  # noqa: E402
import plot  # noqa: E402
import results  # noqa: E402
import tables  # noqa: E402
import timing  # noqa: E402
import verdict  # noqa: E402

FIELDS = {
    *("kind", "op", "mode", "arm", "dtype", "layout", "rows", "cols", "world", "device", "run"),
    *("status", "value_error", "median_ms", "p20_ms", "p80_ms", "samples", "calls", "sets"),
    *("how", "bytes", "gb_s", "floor"),
}
SMALL = ["--device=cpu", "--quick", "--rows=8", "--cols=65"]


def measure(path: Path, *args: str) -> dict[tuple[str, str, str], dict]:
    """Results of benchmarks/ops.py by op, mode and arm; of one point."""
    ops.main([*SMALL, f"--out={path}", *args])
    return {(r["op"], r["mode"], r["arm"]): r for r in results.load(path)["results"]}


@pytest.mark.parametrize("point", ["float32,contiguous", "bfloat16,sliced", "bfloat16,window"])
def test_every_op_mode_and_arm_is_measured(tmp_path, point):
    dtype, layout = point.split(",")
    # other libraries, where they are installed, have tests of their own
    found = measure(tmp_path / "a/b.json", f"--only={point},eager,dense")
    arms = {"eager", "dense"} if layout == "contiguous" else {"eager"}
    modes = [(op, mode) for op, case in cases.CASES.items() for mode in case.modes]
    assert set(found) == {(*pair, arm) for pair in modes for arm in arms}
    assert len(modes) == 3 * 3 + 4 * 2
    size = 8 * 65 * (4 if dtype == "float32" else 2)
    passes = {"forward": 4, "train": 7, "train_both": 8}
    (run,) = results.load(tmp_path / "a/b.json")["runs"]
    for (op, mode, _), result in found.items():
        extra = set() if mode == "forward" else {"gradient_error"}
        assert set(result) == FIELDS | extra
        assert result["status"] == "ok"
        assert 0 < result["p20_ms"] <= result["median_ms"] <= result["p80_ms"]
        if op == "jsd":
            assert result["bytes"] == passes[mode] * size
        shortest = result["bytes"] / run["copy_gb_s"] / 1e6
        assert result["floor"] == pytest.approx(result["median_ms"] / shortest, rel=1e-3)
    assert run["device"] == "cpu"
    assert run["versions"]["torch"] == torch.__version__
    assert len(run["commit"]) == 40


def test_a_wrong_arm_is_shown_as_wrong_and_not_timed(tmp_path, capsys, monkeypatch):
    def out_of_memory(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.\nmore")

    def broken(*inputs):
        raise RuntimeError("it broke")

    wrong = {
        "entropy": lambda x: 1.001 * cases.dense_entropy(x),
        "logprobs": lambda x, ids: cases.dense_logprobs(x, ids).detach() + 0 * x.sum(-1),
        "reverse_kl": lambda p, q: cases.dense_reverse_kl(p, q) * float("nan"),
        # right values, and one gradient of two
        "forward_kl": lambda p, q: cases.dense_forward_kl(p, q.detach()) + 0 * q.sum(-1),
        "logprobs_k256": out_of_memory,
        "logprobs_and_entropy": broken,
    }
    for op, function in wrong.items():
        case = dataclasses.replace(cases.CASES[op], dense=function)
        monkeypatch.setitem(cases.CASES, op, case)
    found = measure(tmp_path / "a.json", "--only=float32,contiguous,eager,dense")
    shown = {key[:2]: r for key, r in found.items() if key[2] == "dense" and r["status"] != "ok"}
    complaints = {
        ("entropy", "forward"): ("wrong", "values are off by 1.0e-03"),
        ("entropy", "train"): ("wrong", "values are off by 1.0e-03"),
        ("logprobs", "train"): ("wrong", "gradients are off by 1.0e+00"),
        ("reverse_kl", "forward"): ("wrong", "values are off by nan"),
        ("reverse_kl", "train"): ("wrong", "values are off by nan"),
        ("reverse_kl", "train_both"): ("wrong", "values are off by nan"),
        ("forward_kl", "train_both"): ("wrong", "gradients are off by 1.0e+00"),
        ("logprobs_k256", "forward"): ("oom", "OutOfMemoryError: CUDA out of memory. Tried"),
        ("logprobs_k256", "train"): ("oom", "OutOfMemoryError: CUDA out of memory. Tried"),
        ("logprobs_and_entropy", "forward"): ("failed", "RuntimeError: it broke"),
        ("logprobs_and_entropy", "train"): ("failed", "RuntimeError: it broke"),
    }
    assert set(shown) == set(complaints)
    printed = capsys.readouterr().out
    for key, (status, note) in complaints.items():
        assert shown[key]["status"] == status
        assert shown[key]["note"].startswith(note)
        assert "median_ms" not in shown[key]
        assert f"| {status} |" in printed
    assert all(r["status"] == "ok" for key, r in found.items() if key[2] == "eager")


def test_an_arm_that_returns_the_mean_is_judged_as_such(tmp_path, monkeypatch):
    def library(device):
        loss = {
            "forward_kl": lambda p, q: cases.dense_forward_kl(p, q).mean(),
            "reverse_kl": lambda p, q: cases.dense_reverse_kl(p, q).sum(),
        }
        return arms.Arm(loss, modes=cases.MODES[:2], mean=True)

    monkeypatch.setitem(arms._FINDERS, "liger", (None, library))
    found = measure(tmp_path / "a.json", "--only=liger,float32,contiguous")
    assert {key[:2]: r["status"] for key, r in found.items()} == {
        ("forward_kl", "forward"): "ok",
        ("forward_kl", "train"): "ok",
        ("reverse_kl", "forward"): "wrong",
        ("reverse_kl", "train"): "wrong",
    }


def test_an_error_that_is_nan_is_the_worst():
    nan = float("nan")
    assert str(verdict.worst([1.0, nan])) == str(verdict.worst([nan, 1.0])) == "nan"
    assert "nan" in str(verdict.complaint(0.0, nan, torch.float32))
    assert verdict.complaint(1e-6, 1e-2, torch.bfloat16) is None
    assert verdict.complaint(1e-6, 1e-2, torch.float32) is not None


def test_parts_come_together_and_what_is_there_is_not_measured_again(tmp_path):
    path = tmp_path / "a.json"
    measure(path, "--only=entropy,forward,float32,contiguous,eager,dense")
    found = measure(path, "--only=entropy,float32,contiguous,eager,dense", "--missing")
    assert len(found) == 4
    assert {key[1]: r["run"] for key, r in found.items()} == {"forward": 1, "train": 2}
    found = measure(path, "--only=entropy,float32,contiguous,eager,dense")
    # run 1 and 2 are gone with their last results
    assert [run["id"] for run in results.load(path)["runs"]] == [3]
    assert {r["run"] for r in found.values()} == {3}


def test_the_plan_of_a_whole_run():
    args = ops.arguments(["--device=cuda"])
    plan = list(ops.points(args))
    grid = {
        (rows, cols, dtype, layout)
        for rows in (64, 256, 1024, 8192)
        for cols in (32000, 37984, 75967, 75968, 151936)
        for dtype in ("bfloat16", "float32")
        for layout in ("contiguous", "sliced")
    }
    assert len(plan) == len(set(plan))
    windows = {(8192, 75968, dtype, "window") for dtype in ("bfloat16", "float32")}
    assert {tuple(point) for point in plan} == grid | windows
    found = dict.fromkeys(("triton", "eager", "compile", "dense"))

    def shapes(arm: str, mode: str) -> set[tuple[int, int]]:
        there = [p for p in plan if arm in ops.arms_at(p, mode, found)]
        if (arm, mode) == ("eager", "train"):
            assert {p for p in plan if p.layout != "window"} == set(there) - windows
        elif arm != "triton":
            assert {p.layout for p in there} == {"contiguous"}
        return {(p.rows, p.cols) for p in there}

    everywhere = {(p.rows, p.cols) for p in plan}
    assert shapes("triton", "train") == shapes("eager", "train") == everywhere
    shared = {(8192, 75968), (1024, 151936), (64, 75968)}
    assert shapes("dense", "train") == shapes("compile", "forward") == shared
    assert shapes("triton", "forward") == shared
    assert shapes("compile", "train") == {*shared, (256, 75968), (1024, 75968)}


def test_a_time_that_may_be_the_hosts_is_noted():
    def plan(seconds):
        launch = timing.Launch(lambda: time.sleep(seconds), 1, torch.device("cpu"))
        launch.how = "events"
        launch.plan()
        return launch.note

    assert plan(0.0001) is None
    assert "queued in" in plan(0.06)


def test_arms_alternate_and_none_is_always_first():
    assert timing.turns({"a": 2, "b": 2, "slow": 1}) == ["a", "b", "b", "slow", "a"]
    assert timing.turns({}) == []


def fake(
    op: str, mode: str, arm: str, ms: float, shape: tuple[int, int] = (8192, 75968), **more
) -> dict:
    """A result as it would come from a GPU."""
    point = {"rows": shape[0], "cols": shape[1], "dtype": "bfloat16", "layout": "contiguous"}
    size = cases.CASES[op].passes(mode) * shape[0] * shape[1] * 2
    numbers = {"status": "ok", "median_ms": ms, "p20_ms": ms, "p80_ms": 1.5 * ms}
    numbers |= {"floor": ms / (size / 4e9), "peak_mib": 1188.4}
    base = {"kind": "op", "op": op, "mode": mode, "arm": arm, **point, "world": 1}
    return base | numbers | more


def test_docs_are_made_from_results(tmp_path):
    run = {"device": "GPU", "versions": {"torch": "2.11"}, "commit": "c" * 40, "copy_gb_s": 4000.0}
    run |= {"date": "2026-11-29T00:00:00", "absent": {"liger": "not installed"}}
    book = results.Results(tmp_path / "r.json", run)
    for op in cases.CASES:
        for arm, ms in (("triton", 1.6), ("compile", 4.0)):
            book.add(fake(op, "train", arm, ms))
            book.add(fake(op, "train", arm, ms / 100, (64, 75968)))
    book.add(fake("jsd", "train", "triton", 2.5, layout="sliced"))
    book.add(fake("jsd", "train", "dense", 0, status="oom"))
    book.add(fake("entropy", "train", "dense", 0, status="wrong"))
    book.add(fake("reverse_kl", "train_both", "triton", 2.0))
    tp = fake("jsd", "train", "Triton shards", 0.75, (1024, 151936), kind="tp", world=2, beta=0.3)
    book.add(tp | {"back_to_back_ms": 0.5, "peak_gib": 0.435})
    book.save()
    page = (ROOT / "docs/benchmarks.md").read_text()
    (tmp_path / "benchmarks.md").write_text(page)
    plot.main([str(tmp_path / "r.json"), f"--docs={tmp_path}"])
    made = (tmp_path / "benchmarks.md").read_text()
    floor = 5 * 8192 * 75968 * 2 / 4e9
    for line in (
        "| GPU | 1 device | 4 TB/s | torch 2.11 | cccccccccc | 2026-11-29 |",
        "Liger: not installed.",
        f"| reverse KL | 1.60 ({1.6 / floor:.2f}x) | 4.00 ({4 / floor:.2f}x) |  |",
        "| JSD | 1.60 (0.73x) | 4.00 (1.84x) | OOM |",
        "| entropy | 1.60 (1.71x) | 4.00 (4.28x) | wrong |",
        "| JSD | Triton |  | 1.60 | 1.60 | 2.40 | 0.73x | 1188 |",
        "| JSD, 8192 rows | 0.73 / 1.15 |",
        "| Triton shards, JSD, beta 0.3 | 2 | 1024 x 151936, bf16 | 0.435 | 0.750 |",
        "![Time over the byte floor, 8192 x 75968, bf16](assets/benchmarks/floor.svg)",
    ):
        assert line in made
    assert made.count("| 2.50x |") == len(cases.CASES)  # faster than torch.compile, 64 rows
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("assets/benchmarks/*.svg")}
    assert set(drawn) == {"floor.svg", "rows.svg", "widths.svg"}
    plot.main([str(tmp_path / "r.json"), f"--docs={tmp_path}"])
    assert (tmp_path / "benchmarks.md").read_text() == made
    assert drawn == {p.name: p.read_bytes() for p in tmp_path.glob("assets/benchmarks/*.svg")}


def shards_on_a_rank(rank, world, options):
    sys.path.append(BENCHMARKS)
    import shards

    args = argparse.Namespace(tp=world, quick=True, rows=5, cols=130, **options)
    found = shards.measure(args, torch.device("cpu"))
    dense = shards.dense_jsd
    shards.dense_jsd = lambda p, q, beta: dense(p, q, beta) * (1 + 0.01 * rank)
    return found, shards.measure(args, torch.device("cpu"))


def test_shards_are_judged_and_timed_with_the_slowest_rank(ranks):
    (found, wrong), same = ranks(shards_on_a_rank, 2, {"dtype": "bfloat16"})
    # wrong on one rank alone, and not timed on any
    assert [r["status"] for r in wrong] == [r["status"] for r in same[1]] == ["wrong", "ok"]
    assert "median_ms" not in wrong[0]
    assert wrong[0]["note"] == "values are off by 1.0e-02 of the largest, at most 1e-04"
    assert found == same[0]
    assert [(r["op"], r["arm"]) for r in found] == [
        ("jsd", "gather + dense"),
        ("jsd", "eager shards"),
    ]
    for result in found:
        assert (result["status"], result["world"], result["beta"]) == ("ok", 2, 0.3)
        assert result["value_error"] < 1e-5
        assert 0 < result["gradient_error"] < 1e-2
        assert 0 < result["p20_ms"] <= result["median_ms"] <= result["p80_ms"]


def test_shards_without_devices_say_what_they_need(tmp_path, capsys):
    ops.main(["--device=cuda", "--tp=2", f"--out={tmp_path}/a.json"])
    printed = capsys.readouterr().out
    assert "--tp 2 needs 2 devices in one machine and finds 0" in printed
    assert "benchmarks/ops.py --tp 2" in printed
    assert not (tmp_path / "a.json").exists()


def test_the_pages_hold_what_the_results_make(tmp_path):
    folder = ROOT / "benchmarks" / "results"
    found = {name: (ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "accuracy.md")}
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    # two ranks' results first: a later file's machine is told later
    files = [str(folder / name) for name in ("h200-tp2.json", "h200.json")]
    plot.main([*files, f"--docs={tmp_path}"])
    files = [str(folder / "accuracy" / name) for name in ("cpu.json", "h200.json")]
    accuracy.main([*files, f"--docs={tmp_path / 'accuracy.md'}"])
    assert {name: (tmp_path / name).read_text() for name in found} == found


@pytest.mark.parametrize(
    ("label", "op", "other"),
    [
        ("reverse KL", "reverse_kl", "liger"),
        ("JSD", "jsd", "liger"),
        ("log-probabilities and entropy", "logprobs_and_entropy", "trl"),
    ],
)
def test_the_readme_tells_what_was_measured(label, op, other):
    book = plot.collect([ROOT / "benchmarks" / "results" / "h200.json"])
    found = [
        book.get(op, "train", arm, "bfloat16", (8192, 75968))
        for arm in ("triton", "compile", "dense", other)
    ]
    cells = [f"{tables.ms(r['median_ms'])}, {r['peak_mib']:.0f} MiB" for r in found]
    assert f"| {label} | {' | '.join(cells)} |\n" in (ROOT / "README.md").read_text("utf-8")
