"""Checkpoints of a run: what resumes, how exactly, and what is passed over or refused."""

import os
import shutil
import signal

import pytest
import torch

from tiny_run import logged, recorded, same, tiny_run
from vocabtp.opsd.checkpoint_files import fault
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import CheckpointError, DeviceMemoryError, Interrupted
from vocabtp.opsd.trainer import Trainer

RESUMED = {
    "max_steps": 6,
    "warmup_steps": 2,
    "save_steps": 3,
    "keep_checkpoints": 9,
    "micro_batch_size_per_gpu": 2,
}


def test_memory_that_runs_out_as_a_checkpoint_is_read(tmp_path, monkeypatch):
    path = tiny_run(tmp_path, training={"max_steps": 1, "train_batch_size": 2})
    recorded(path)
    trainer = Trainer(load_config(path, ["training.max_steps=2"]))

    def load(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(type(trainer.checkpoints), "load", load)
    for call in (trainer.train, lambda: trainer.export(tmp_path / "exported")):
        with pytest.raises(DeviceMemoryError, match="out of memory in the load phase: "):
            call()


def test_resume_is_exact(tmp_path):
    """B48: 6 steps in one go, and 3 + 3, with dropout and sampling."""
    path = tiny_run(
        tmp_path,
        held_out=2,
        model={"attention_dropout": 0.2},
        rollout={"temperature": 1.0},
        training=RESUMED,
    )
    straight = recorded(path, f"training.save_dir={tmp_path / 'one'}")
    two = f"training.save_dir={tmp_path / 'two'}"
    # the second half is lost, not planned: the schedule is that of 6 steps throughout
    first = recorded(path, two)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000006")
    torch.manual_seed(999)
    resumed = recorded(path, two)
    assert first["losses"] == straight["losses"]
    assert resumed["losses"] == straight["losses"][3:]
    assert resumed["answers"] == straight["answers"][12:]
    for part in ("weights", "optimizer"):
        assert same(resumed[part], straight[part])
    assert [m["learning_rate"] for m in resumed["metrics"]] == [
        m["learning_rate"] for m in straight["metrics"][3:]
    ]
    assert logged(tmp_path / "two") == logged(tmp_path / "one")
    # the evaluation before the first step is not lost with the process that made it
    assert resumed["result"].before == straight["result"].before
    again = recorded(path, two)
    assert again["losses"] == []
    assert same(again["weights"], straight["weights"])


def test_a_signal_in_the_middle_of_a_step_leaves_no_trace(tmp_path, monkeypatch):
    """After the first of a step's two micro-batches, with dropout and sampling."""
    import vocabtp.opsd.step as module

    path = tiny_run(
        tmp_path,
        model={"attention_dropout": 0.2},
        rollout={"temperature": 1.0},
        training={"max_steps": 3, "micro_batch_size_per_gpu": 2},
    )
    straight = recorded(path, f"training.save_dir={tmp_path / 'one'}")
    two = f"training.save_dir={tmp_path / 'two'}"
    real, calls = module.distill_loss, []

    def told_to_stop(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    monkeypatch.setattr(module, "distill_loss", told_to_stop)
    with pytest.raises(Interrupted):
        recorded(path, two)
    monkeypatch.undo()
    assert len(calls) == 3
    assert [p.name for p in (tmp_path / "two" / "checkpoints").iterdir()] == ["step-00000001"]
    resumed = recorded(path, two)
    assert resumed["losses"] == straight["losses"][1:]
    assert same(resumed["weights"], straight["weights"])
    assert same(resumed["optimizer"], straight["optimizer"])
    assert logged(tmp_path / "two") == logged(tmp_path / "one")


def test_a_signal_ends_an_evaluation_while_it_decodes(tmp_path, monkeypatch):
    """In the middle of the only batch: no more tokens, nothing scored, a checkpoint."""
    import vocabtp.opsd.rollout as rollout_module
    import vocabtp.opsd.run as run_module
    from vocabtp.opsd.errors import Interrupted

    path = tiny_run(
        tmp_path,
        held_out=2,
        rollout={"max_response_length": 12},
        training={"micro_batch_size_per_gpu": 2, "train_batch_size": 2, "max_steps": 1},
    )
    evaluate, asked, scored = run_module.evaluate, [], []

    def evaluating(*args, tick, stop, **options):
        def told():
            asked.append(stop())
            os.kill(os.getpid(), signal.SIGTERM)
            return stop()

        score = args[2].teacher.score
        monkeypatch.setattr(args[2].teacher, "score", lambda *a: scored.append(1) or score(*a))
        return evaluate(*args, tick=tick, stop=told, **options)

    monkeypatch.setattr(rollout_module, "_STOP_EVERY", 1)
    monkeypatch.setattr(run_module, "evaluate", evaluating)
    with pytest.raises(Interrupted):
        recorded(path)
    assert asked == [False]
    assert not scored
    assert (tmp_path / "out" / "checkpoints" / "step-00000000" / "COMPLETE").exists()


def test_half_written_checkpoints_are_passed_over(tmp_path, capsys):
    """B50: the newest whole one is used, and each newer one is named with what is wrong."""
    path = tiny_run(tmp_path, training={"max_steps": 4, "save_steps": 1, "keep_checkpoints": 9})
    straight = recorded(path)
    root = tmp_path / "out" / "checkpoints"
    steps = {i: root / f"step-{i:08d}" for i in range(1, 5)}
    files = {p.name: p.read_bytes() for p in steps[1].iterdir()}
    # 2: a file cut in half; 3: the marker missing; 4: the writer never renamed
    tensors = next(p for p in steps[2].iterdir() if p.suffix == ".distcp")
    tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])
    (steps[3] / "COMPLETE").unlink()
    steps[4].rename(root / "step-00000004.partial")
    capsys.readouterr()
    resumed = recorded(path)
    text = capsys.readouterr().err
    for said in ("bytes instead of", "no file COMPLETE", "did not finish"):
        assert said in text
    assert "step-00000001: step 2 is the next" in text
    assert resumed["losses"] == straight["losses"][1:]
    assert same(resumed["weights"], straight["weights"])
    assert {p.name: p.read_bytes() for p in steps[1].iterdir()} == files
    assert not fault(steps[4])


@pytest.mark.parametrize("broken", ["writer", "marker"])
def test_a_writer_that_fails_leaves_the_one_before(tmp_path, monkeypatch, broken):
    from vocabtp.opsd import checkpoint, checkpoint_files

    path = tiny_run(tmp_path, training={"max_steps": 4, "save_steps": 2})
    marker = broken == "marker"
    module, name = (checkpoint_files, "_write") if marker else (checkpoint, "save_tensors")
    real, count = getattr(module, name), []

    def fail(*args, **options):
        count.append(1)
        if len(count) == (3 if marker else 2):
            raise OSError(28, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        recorded(path)
    monkeypatch.undo()
    straight = recorded(path, f"training.save_dir={tmp_path / 'whole'}")
    resumed = recorded(path)
    assert resumed["losses"] == straight["losses"][2:]
    assert same(resumed["weights"], straight["weights"])


def test_only_the_last_checkpoints_are_kept(tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 5, "save_steps": 1, "keep_checkpoints": 2})
    (tmp_path / "out" / "checkpoints" / "step-00000003.partial").mkdir(parents=True)
    recorded(path)
    names = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def test_resume_under_another_configuration_names_what_changed(tmp_path, capsys):
    path = tiny_run(tmp_path, training={"max_steps": 2})
    recorded(path)
    for override, key, old, new in (
        ("training.learning_rate=0.5", "training.learning_rate", "0.01", "0.5"),
        ("distillation.loss_type=jsd", "distillation.loss_type", "'reverse_kl'", "'jsd'"),
        ("rollout.temperature=1.0", "rollout.temperature", "0.0", "1.0"),
        ("data.shuffle=false", "data.shuffle", "True", "False"),
    ):
        with pytest.raises(CheckpointError) as caught:
            recorded(path, override)
        for said in (key, old, new):
            assert said in str(caught.value)
    with pytest.raises(CheckpointError, match="never"):
        recorded(path, "training.resume=never")
    longer = recorded(path, "training.max_steps=3", "distillation.chunk_size=2")
    assert len(longer["losses"]) == 1
    assert "training.max_steps changed from 2 to 3" in capsys.readouterr().err
    assert recorded(path, "training.max_steps=3")["losses"] == []
    assert "no step is left to train" in capsys.readouterr().err
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text().replace("=", "+", 1))
    with pytest.raises(CheckpointError, match=r"content of data\.path"):
        recorded(path)
