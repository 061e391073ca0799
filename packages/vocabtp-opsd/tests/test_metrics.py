import io
import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vocabtp.opsd.metrics import MetricsWriter, Progress, read_metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_holds_step_kind_and_values(tmp_path):
    with MetricsWriter(tmp_path / "out", tensorboard=False) as writer:
        writer.write(1, {"loss": 0.5, "time": {"rollout": 1.5}, "peak_memory": [3, 4]})
        writer.write(1, {"exact_match": 0.25}, kind="eval")
        assert lines(writer.path) == [
            {
                "step": 1,
                "kind": "train",
                "loss": 0.5,
                "time": {"rollout": 1.5},
                "peak_memory": [3, 4],
            },
            {"step": 1, "kind": "eval", "exact_match": 0.25},
        ]  # before the close: a run that is killed keeps its records


def test_numbers_that_json_lacks_survive(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": [-math.inf], "d": None})
    text = writer.path.read_text()
    assert json.loads(text, parse_constant=pytest.fail)["b"] == "Infinity"
    (record,) = read_metrics(writer.path)
    assert math.isnan(record["a"])
    assert (record["b"], record["d"]) == (math.inf, None)


def test_resume_drops_what_the_stopped_run_left_behind(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(6):
            writer.write(step, {"loss": float(step)})
    with writer.path.open("a") as file:
        file.write('{"step": 6, "kind": "tr')
    with MetricsWriter(tmp_path, resumed_step=3, tensorboard=False) as writer:
        writer.write(4, {"loss": 40.0})
    records = lines(writer.path)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert records[-1]["loss"] == 40.0


def test_new_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(0, {"exact_match": 0.5}, kind="eval")
            writer.write(1, {"loss": 1.0})
    assert [r["step"] for r in lines(writer.path)] == [0, 1]


def test_resume_leaves_a_fitting_file_alone(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
    before = writer.path.stat().st_ino
    MetricsWriter(tmp_path, resumed_step=1, tensorboard=False).close()
    assert writer.path.stat().st_ino == before


def test_tensorboard_gets_every_number_and_forgets_later_steps(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": step / 2, "time": {"rollout": 2.0}, "peak": [7, 8]})
    with MetricsWriter(tmp_path, resumed_step=1) as writer:
        writer.write(2, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 9.0)]
    assert {"train/time/rollout", "train/peak/0", "train/peak/1"} <= set(events.Tags()["scalars"])


def test_plain_lines_have_loss_speed_and_time_left():
    stream = io.StringIO()
    with Progress(20, every=10, stream=stream) as progress:
        for step in range(1, 21):
            progress.update(step, loss=None if step == 20 else 1 / 3, tokens_per_s=1234.5)
        progress.log("[bold] saved")
    text = stream.getvalue().splitlines()
    assert [line.split()[1] for line in text[:3]] == ["1/20", "10/20", "20/20"]
    assert "loss 0.3333  1,234 tokens/s  left 0:00" in text[1]
    assert "loss skipped" in text[2]
    assert text[3] == "[bold] saved"


def test_time_left_counts_from_where_the_run_resumed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("vocabtp.opsd.metrics.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(1000, done=900, stream=stream)
    now[0] += 60.0
    progress.update(910, loss=1.0, tokens_per_s=1.0)  # 6 s a step, 90 to go
    now[0] += 60_000.0
    progress.update(920, loss=1.0, tokens_per_s=1.0)
    assert [line.split("left ")[1] for line in stream.getvalue().splitlines()] == [
        "9:00",
        "66:44:00",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress(4, done=1, stream=stream) as progress:
        progress.update(2, loss=0.125, tokens_per_s=2000)
        progress.log("step 2 [saved]")
        progress.update(4, loss=0.25, tokens_per_s=3000)
    text = stream.getvalue()
    for part in ("loss 0.2500", "3,000 tokens/s", "left ", "4/4", "step 2 [saved]"):
        assert part in text


def test_foreign_lines_are_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "kind": "train"}\n'
    path.write_bytes(b'\xff\xfe\n{"step": "x"}\n{"step": [1]}\n{"step": null}\n' + kept + b'{"st')
    MetricsWriter(tmp_path, resumed_step=2, tensorboard=False).close()
    assert path.read_bytes() == kept
