"""Phases of ranks, as their peers and their parent read them; memory that runs out."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tiny_run import recorded, tiny_run
from vocabtp.opsd import launch, phases
from vocabtp.opsd.errors import DeviceMemoryError, Interrupted, RankLostError
from vocabtp.opsd.phases import Phases, read_records

BROKEN = "RuntimeError: [gloo] Connection closed by peer"


def rank(number, folder):
    return Phases({"RANK": str(number), "WORLD_SIZE": "2", "VOCABTP_OPSD_NOTES": str(folder)})


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A process that passes for rank 1, in the teacher phase of step 3."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = rank(1, tmp_path)
    other.step = 3
    monkeypatch.setattr(phases.os, "getpid", lambda: process.pid)
    with other.enter("teacher"):
        monkeypatch.undo()
        yield process
        monkeypatch.setattr(phases.os, "getpid", lambda: process.pid)
    process.kill()
    process.wait()


def test_records_tell_phase_and_how_it_was_left(tmp_path):
    mine = rank(0, tmp_path)
    mine.step = 12
    for name, words in (("student", "student phase of step 12"), ("save", "save phase")):
        with mine.enter(name):
            assert read_records(tmp_path, 2) == {0: (os.getpid(), "", words)}
        assert read_records(tmp_path, 2)[0][2] == "midst of step 12"
    with mine.watch_peers():
        pass
    assert read_records(tmp_path, 2)[0][1] == "left"
    with pytest.raises(ValueError, match="broken"), mine.watch_peers(), mine.enter("teacher"):
        raise ValueError("broken")
    assert read_records(tmp_path, 2)[0][1:] == ("failed", "teacher phase of step 12")
    with pytest.raises(Interrupted), mine.watch_peers():
        raise Interrupted(15)
    assert read_records(tmp_path, 2)[0][1] == "left"
    # no launcher, no file
    assert Phases({}).folder is None


def test_a_killed_peer_is_named_with_its_phase(tmp_path, peer, monkeypatch):
    mine = rank(0, tmp_path)
    assert mine.lost() is None
    monkeypatch.setattr(phases, "_WAIT_S", 0.1)
    with pytest.raises(RuntimeError, match="gloo"), mine.watch_peers():
        raise RuntimeError(BROKEN)  # while the peer lives, its words are all there is
    monkeypatch.setattr(phases, "_WAIT_S", 20.0)
    peer.kill()  # and nobody waits for it: a zombie
    words = "rank 1 was killed in the teacher phase of step 3"
    with pytest.raises(RankLostError, match=words), mine.watch_peers():
        raise RuntimeError(BROKEN)
    with pytest.raises(RuntimeError, match="my own"), mine.watch_peers():
        raise RuntimeError("my own")
    peer.wait()
    assert str(mine.lost()) == words
    rank(1, tmp_path)._tell("failed")
    assert mine.lost() is None  # it says so, and has not ended yet
    monkeypatch.setattr(phases, "_alive", lambda pid: False)
    assert str(mine.lost()).startswith("rank 1 failed")
    rank(1, tmp_path)._tell("left")
    assert mine.lost() is None


def test_files_of_an_earlier_run_are_nobodys_loss(tmp_path, peer):
    peer.kill()
    peer.wait()
    mine = rank(0, tmp_path)
    assert mine.lost() is None
    with pytest.raises(RuntimeError, match="gloo"), mine.watch_peers():
        raise RuntimeError(BROKEN)


def test_any_launcher_of_several_ranks_gives_them_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(phases.tempfile, "gettempdir", lambda: str(tmp_path))
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    first, second = (Phases(ranks | {"MASTER_PORT": port}).folder for port in ("1", "2"))
    assert first.parent == second.parent == tmp_path
    assert first != second
    assert read_records(first, 2)[1][0] == os.getpid()
    # one of that name that is another user's
    monkeypatch.setattr(phases.os, "getuid", lambda: first.stat().st_uid + 1)
    assert Phases(ranks | {"MASTER_PORT": "1"}).folder is None


def test_a_rank_that_waits_for_a_killed_peer_is_ended(tmp_path, peer, monkeypatch):
    monkeypatch.setattr(phases, "_GRACE_S", 0.1)
    found, ended = [], threading.Event()
    with rank(0, tmp_path).watch_peers(lambda lost: (found.append(str(lost)), ended.set())):
        assert not ended.wait(1.5)
        peer.kill()
        assert ended.wait(20)
    assert found == ["rank 1 was killed in the teacher phase of step 3"]


def test_a_failing_rank_outlives_a_sigterm_until_it_has_told(tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "_GRACE_S", 0.3)
    codes, ended = [], threading.Event()
    monkeypatch.setattr(phases.os, "_exit", lambda code: (codes.append(code), ended.set()))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(ValueError, match="mine"), rank(0, tmp_path).watch_peers():
            raise ValueError("mine")
        os.kill(os.getpid(), signal.SIGTERM)
        assert not codes  # time to tell
        assert ended.wait(20)  # not for ever
        assert codes == [128 + signal.SIGTERM]
        # a process alone, and one that has a handler of its own, are left as they are
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(ValueError, match="mine"), Phases({}).watch_peers():
            raise ValueError("mine")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(ValueError, match="mine"), rank(0, tmp_path).watch_peers():
            raise ValueError("mine")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_parent_names_the_phase_of_a_killed_rank(tmp_path, peer):
    doing = launch._read_phases(tmp_path)
    lost = launch.Failure(0, "lost", "rank 1 was killed", 1, 3.0)
    outcome = launch.judge({0: 1, 1: -signal.SIGKILL}, {0: lost}, doing)
    assert outcome.failure.message == (
        "killed by signal 9 (SIGKILL) in the teacher phase of step 3 (out of memory?)"
    )


OUT = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError(),
}


@pytest.mark.parametrize("kind", OUT)
def test_out_of_memory_names_phase_and_keys(kind):
    mine = Phases({})
    mine.step = 4
    with pytest.raises(DeviceMemoryError) as caught, mine.enter("student"):
        raise OUT[kind]
    message = str(caught.value)
    assert message.startswith("out of memory in the student phase of step 4: ")
    assert "distillation.chunk_size or training.micro_batch_size_per_gpu" in message
    if kind == "cuda":
        assert message.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB)")
    with pytest.raises(RuntimeError, match="something else"), mine.enter("student"):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("vocabtp.opsd.step.generate", r"rollout phase of step 1: .*rollout\.max_response_length"),
        ("vocabtp.opsd.teacher.Teacher.score", r"teacher phase of step 1: .*payload.*offload"),
        ("vocabtp.opsd.step.distill_loss", r"student phase of step 1: .*distillation\.chunk_size"),
        ("vocabtp.opsd.engine.TorchEngine.step", r"update phase of step 1: .*parallel\.tp"),
        ("vocabtp.opsd.checkpoint.Checkpoints.save", r"save phase: .*"),
        ("vocabtp.opsd.trainer.read_models", r"load phase: .*parallel\.tp"),
        ("vocabtp.opsd.trainer.TorchEngine", r"load phase: .*parallel\.tp"),
    ],
)
def test_every_phase_of_a_run_is_entered(tmp_path, monkeypatch, place, words):
    def fail(*_, **__):
        raise OUT["cuda"]

    monkeypatch.setattr(place, fail)
    path = tiny_run(tmp_path, training={"max_steps": 1, "train_batch_size": 1})
    with pytest.raises(DeviceMemoryError, match=words):
        recorded(path)
