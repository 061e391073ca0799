import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vocabtp.opsd import launch
from vocabtp.opsd.launch import Failure, judge

# the command with a trainer that only fails, waits or prints; ranks run this same file
PROGRAM = """
import os, signal, sys, time, types
from vocabtp.opsd import cli, launch
from vocabtp.opsd.errors import Interrupted, ModelError

def put(line):  # in one piece, though both ranks write to the same pipe
    os.write(1, f"{line}\\n".encode())

class Trainer:
    def __init__(self, config):
        self.config = config
    def check(self):
        if launch.rank() == 1:
            put(f"rank 1 of {os.environ['WORLD_SIZE']} {os.environ['OMP_NUM_THREADS']}")
        return {}
    def train(self):
        how = self.config.data.answer_field
        if how == "all":
            raise ModelError("heads differ")
        if how == "wait":
            hit = []
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda n, frame: hit.append(n))
            put(f"ready {os.getpid()}")
            while not hit:
                time.sleep(0.05)
            put("saved")
            raise Interrupted(hit[0])
        if launch.rank() == 1:
            if how == "crash":
                raise RuntimeError("rank one\\n is broken")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(50)

fake = types.ModuleType("vocabtp.opsd.trainer")
fake.Trainer = Trainer
sys.modules["vocabtp.opsd.trainer"] = fake
launch.MODULE = "program"
if __name__ == "__main__":
    cli.main()
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "run.yaml").write_text(
        "student: {model_name_or_path: a/b}\nteacher: {model_name_or_path: a/c}\n"
        "data: {path: p.jsonl, chat_template: tokenizer}\nparallel: {tp: 2, nproc: 2}\n"
        "rollout: {engine: hybrid_engine}\n"
    )
    # a module of the working directory must not replace a real one in the ranks
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "yaml.py").write_text("raise SystemExit('shadowed')\n")
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    # an empty entry would be the working directory
    outer = [p for p in [os.environ.get("PYTHONPATH")] if p]
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *outer])
    running = []

    def call(command, how="", *more):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "program", command, str(tmp_path / "run.yaml"),
             f"data.answer_field={how or 'answer'}", *more],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            cwd=tmp_path / "cwd",
        )  # fmt: skip
        running.append(process)
        return process

    yield call
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_ranks_get_their_place_and_a_share_of_the_cores(start):
    process = start("check")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"rank 1 of 2 {max(1, os.cpu_count() // 2)}\n" in out
    assert out.count("student:") == 1  # the resolved configuration, from rank 0 alone
    assert out.count("micro_batch_size_per_gpu: 1") == 1
    # one notice, and nothing from torch's launcher
    assert err == "vocabtp-opsd: rollout.engine: hybrid_engine is read as local\n"


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("all", "heads differ", 2),
        ("crash", "[rank 1] RuntimeError: rank one is broken (--debug shows the traceback)", 1),
        ("kill", "[rank 1] killed by signal 9 (SIGKILL) (out of memory?)", 137),
    ],
)
def test_failure_is_told_once_with_its_own_code(start, how, message, code):
    process = start("train", how)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 45  # the rank that did not fail would sleep for 50 s
    assert err.splitlines()[1:] == [f"vocabtp-opsd: error: {message}"]
    assert process.returncode == code


@pytest.fixture
def wait_ready():
    pids = []

    def call(process):
        for _ in range(2):
            word, pid = process.stdout.readline().split()
            assert word == "ready"
            pids.append(int(pid))

    yield call
    for pid in pids:  # a test that fails must not leave its ranks behind
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_every_rank_save(start, wait_ready, number):
    process = start("train", "wait")
    wait_ready(process)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert out == "saved\nsaved\n"
    assert process.returncode == 128 + number
    assert err.splitlines()[1:] == [f"vocabtp-opsd: ended by {number.name}"]
    assert time.monotonic() - began < 10


def test_ranks_do_not_outlive_a_killed_parent(start, wait_ready):
    process = start("train", "wait")
    wait_ready(process)
    process.kill()
    # the pipe ends when the last rank that holds it does
    out, _ = process.communicate(timeout=20)
    assert out == "saved\nsaved\n"


def test_watch_parent_calls_back_once_the_parent_is_another(monkeypatch):
    parents = iter([10, 10, 10])
    monkeypatch.setattr("vocabtp.opsd.launch.os.getppid", lambda: next(parents, 1))
    gone = threading.Event()
    launch.watch_parent(poll_s=0.01, on_orphan=gone.set)
    assert gone.wait(5)


USER = Failure(0, "user", "heads differ", 2, 10.0)
ECHO = Failure(0, "crash", "RuntimeError: [gloo] Connection closed by peer", 1, 5.0)
CRASH = Failure(1, "crash", "ValueError: broken", 1, 11.0)


class TestJudge:
    def test_own_error_before_an_earlier_echo(self):
        outcome = judge({0: 1, 1: 1}, {0: ECHO, 1: CRASH})
        assert (outcome.failure, outcome.code) == (CRASH, 1)

    def test_killed_rank_before_an_echo(self):
        outcome = judge({0: 1, 1: -9}, {0: ECHO})
        assert outcome.failure.rank == 1
        assert outcome.code == 137

    def test_own_error_before_ranks_that_the_parent_ended(self):
        for code in (-9, -15):
            assert judge({0: code, 1: 1}, {1: CRASH}).failure is CRASH

    def test_ranks_that_the_parent_ended_come_last(self):
        for code in (7, -9, -11):
            assert judge({0: -15, 1: code}, {}).failure.rank == 1

    def test_crash_in_native_code_before_an_echo_and_an_ended_rank(self):
        outcome = judge({0: 1, 1: -11, 2: -15}, {0: ECHO})
        assert outcome.failure.message == "killed by signal 11 (SIGSEGV)"
        assert outcome.code == 139

    def test_earliest_of_two_errors(self):
        later = Failure(0, "crash", "KeyError: 3", 1, 12.0)
        assert judge({0: 1, 1: 1}, {0: later, 1: CRASH}).failure is CRASH

    def test_echo_alone_is_still_shown(self):
        assert judge({0: 1}, {0: ECHO}).failure is ECHO

    def test_same_words_of_all_ranks_are_shared(self):
        same = Failure(1, "user", USER.message, 2, 11.0)
        assert judge({0: 2, 1: 2}, {0: USER, 1: same}).shared
        other = Failure(1, "user", "something else", 2, 11.0)
        assert not judge({0: 2, 1: 2}, {0: USER, 1: other}).shared
        assert not judge({1: 2, 0: -15}, {1: other}).shared

    def test_ranks_that_ended_in_good_order_have_nothing_to_tell(self):
        outcome = judge({0: 143, 1: 143}, {})
        assert (outcome.failure, outcome.code) == (None, 143)

    def test_exit_code_without_a_note(self):
        outcome = judge({1: 7}, {})
        assert (outcome.failure.message, outcome.code) == ("ended with exit code 7", 7)


def test_note_of_wrong_input_waits_for_the_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("VOCABTP_OPSD_NOTES", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = Failure(1, "user", "heads differ", 2, 11.0)
    threading.Timer(0.3, launch.leave_note, [other], {"wait_s": 0.0}).start()
    launch.leave_note(USER, wait_s=20.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_note_without_a_parent_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VOCABTP_OPSD_NOTES", str(tmp_path / "gone"))
    launch.leave_note(CRASH)
    assert capsys.readouterr().err == "[rank 1] ValueError: broken\n"
