"""`training.async_save`: checkpoints that are written while training goes on."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import vocabtp.opsd.checkpoint as module
import vocabtp.opsd.run as run_module
from tiny_models import tiny_model
from tiny_run import recorded, same, tiny_run
from vocabtp.opsd.checkpoint import Checkpoints
from vocabtp.opsd.checkpoint_files import Saved
from vocabtp.opsd.config import TrainingConfig
from vocabtp.opsd.engine import TorchEngine
from vocabtp.opsd.errors import CheckpointError, Interrupted
from vocabtp.opsd.parallel import Layout

ASYNC = "training.async_save=true"


def names(root):
    return sorted(path.name for path in root.iterdir())


class Held:
    """Writes of tensors wait at a gate, and take a while; what happened is noted in order."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.gate, self.begun, self.log = threading.Event(), threading.Event(), []
        write = module.FileSystemWriter.write_data

        def held(*args, **options):
            self.log.append("write")
            self.begun.set()
            assert self.gate.wait(30)
            time.sleep(seconds)
            done = write(*args, **options)
            self.log.append("written")
            return done

        monkeypatch.setattr(module.FileSystemWriter, "write_data", held)


def test_what_is_written_is_the_state_when_it_was_saved(tmp_path, monkeypatch):
    """The tensors are written after all later steps: they must be copies, on the CPU too."""
    path = tiny_run(tmp_path, training={"max_steps": 4, "lr_scheduler": "constant"})
    straight = recorded(path, f"training.save_dir={tmp_path / 'straight'}")
    held, step = Held(monkeypatch), run_module.Stepper.run

    def steps(self, index, *rest):
        assert index < 2 or held.begun.wait(30)
        report = step(self, index, *rest)
        held.log.append(index)
        if index == 3:
            held.gate.set()
        return report

    monkeypatch.setattr(run_module.Stepper, "run", steps)
    recorded(path, ASYNC, "training.save_steps=2")
    root = tmp_path / "out" / "checkpoints"
    assert held.log.index("write") < held.log.index(2) < held.log.index(3)
    assert held.log.index(3) < held.log.index("written")
    assert names(root) == ["step-00000002", "step-00000004"]
    assert json.loads((root / "step-00000002" / "state.json").read_text())["step"] == 2
    (root / "step-00000004").rename(root / "step-00000004.partial")
    again = recorded(path)
    assert again["losses"] == straight["losses"][2:]
    assert same(again["weights"], straight["weights"])
    assert same(again["optimizer"], straight["optimizer"])


def test_one_at_a_time_and_the_last_ones_are_kept(tmp_path, monkeypatch):
    held = Held(monkeypatch, seconds=0.2)
    held.gate.set()
    keep = {"max_steps": 5, "save_steps": 1, "keep_checkpoints": 2, "async_save": True}
    recorded(tiny_run(tmp_path, training=keep))
    assert held.log == ["write", "written"] * 5
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000004", "step-00000005"]


@pytest.fixture
def saver(tmp_path):
    """Saves a step in the background, one model and optimizer at a time."""
    net = tiny_model("llama")
    engine = TorchEngine(net, TrainingConfig(), Layout(), 3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Layout(), keep=2)

    def save(step):
        return checkpoints.save(net, engine, Saved(step=step), background=True)

    return SimpleNamespace(save=save, checkpoints=checkpoints, root=checkpoints.root)


def test_nothing_passes_for_a_checkpoint_before_it_is_whole(saver, monkeypatch):
    saver.save(1)
    saver.checkpoints.wait()
    held = Held(monkeypatch)
    path = saver.save(2)
    assert names(saver.root) == ["step-00000001", "step-00000002.partial"] or held.log == []
    assert not path.exists()
    saver.checkpoints.give_time(0.05)
    assert saver.checkpoints.latest(print) == saver.root / "step-00000001"
    held.gate.set()
    saver.checkpoints.give_time(30)
    assert saver.checkpoints.latest(print) == path
    saver.checkpoints.wait()


@pytest.mark.parametrize("when", ["next save", "end"])
def test_an_error_in_the_background_names_the_directory(saver, monkeypatch, when):
    saver.save(1)
    saver.checkpoints.wait()

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.FileSystemWriter, "write_data", full)
    saver.save(2)
    with pytest.raises(CheckpointError) as caught:
        saver.save(3) if when == "next save" else saver.checkpoints.wait()
    assert "step-00000002.partial: could not be written" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("step-00000001 is still the newest")
    assert names(saver.root) == ["step-00000001"]
    # told once
    saver.checkpoints.wait()
    monkeypatch.undo()
    saver.save(3)
    saver.checkpoints.wait()
    assert names(saver.root) == ["step-00000001", "step-00000003"]


def test_a_signal_waits_for_the_checkpoint_under_way(tmp_path, monkeypatch):
    path = tiny_run(tmp_path, training={"max_steps": 9, "save_steps": 2, "async_save": True})
    held, step = Held(monkeypatch), run_module.Stepper.run

    def stopped(self, index, signum, *rest):
        if index == 2:
            # while the checkpoint of step 2 is being written
            threading.Timer(0.3, held.gate.set).start()
            return step(self, index, lambda: 15, *rest)
        return step(self, index, signum, *rest)

    monkeypatch.setattr(run_module.Stepper, "run", stopped)
    with pytest.raises(Interrupted):
        recorded(path)
    assert held.log == ["write", "written"] * 2
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000002", "step-00000003"]


def test_a_signal_saves_though_the_checkpoint_under_way_failed(tmp_path, monkeypatch, capsys):
    path = tiny_run(tmp_path, training={"max_steps": 9, "save_steps": 2, "async_save": True})
    step, write, calls = run_module.Stepper.run, module.FileSystemWriter.write_data, []

    def full_once(*args, **options):
        calls.append(0)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    def stopped(self, index, signum, *rest):
        return step(self, index, (lambda: 15) if index == 2 else signum, *rest)

    monkeypatch.setattr(module.FileSystemWriter, "write_data", full_once)
    monkeypatch.setattr(run_module.Stepper, "run", stopped)
    with pytest.raises(Interrupted):
        recorded(path)
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000003"]
    assert "step-00000002.partial: could not be written" in capsys.readouterr().out


def test_a_failed_run_leaves_the_checkpoint_under_way_whole(tmp_path, monkeypatch):
    path = tiny_run(tmp_path, training={"max_steps": 4, "save_steps": 2, "async_save": True})
    held, step = Held(monkeypatch), run_module.Stepper.run

    def broken(self, index, *rest):
        if index == 3:
            threading.Timer(0.3, held.gate.set).start()
            raise RuntimeError("broken")
        return step(self, index, *rest)

    monkeypatch.setattr(run_module.Stepper, "run", broken)
    with pytest.raises(RuntimeError, match="broken"):
        recorded(path)
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000002"]


def _copies(rank, world, path, fails):
    """Saves after each step, beside the collectives of the next; rank 1's disk is full once."""
    write, calls = module.FileSystemWriter.write_data, []

    def full(*args, **options):
        calls.append(1)
        if fails and rank == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    module.FileSystemWriter.write_data = full
    try:
        run = recorded(path, "parallel.shard=zero3", ASYNC)
        return run["losses"], run["weights"]
    except CheckpointError as error:
        return str(error)
    finally:
        module.FileSystemWriter.write_data = write


def test_ranks_write_beside_their_training(ranks, tmp_path):
    path = tiny_run(tmp_path, training={"save_steps": 1, "keep_checkpoints": 9})
    root = tmp_path / "out" / "checkpoints"
    for said in ranks(_copies, 2, path, True):
        assert "step-00000002.partial: could not be written: rank 1: " in said
        assert said.endswith("step-00000001 is still the newest")
    assert names(root) == ["step-00000001"]
    resumed = ranks(_copies, 2, path, False)
    assert names(root) == ["step-00000001", "step-00000002", "step-00000003"]
    straight = recorded(path, f"training.save_dir={tmp_path / 'straight'}")
    for losses, weights in resumed:
        assert losses == pytest.approx(straight["losses"][1:], rel=2e-5)
        for name, weight in straight["weights"].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
