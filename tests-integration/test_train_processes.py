"""The command as a user runs it: stopped, killed in the middle of a checkpoint, resumed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tiny_run import recorded, tiny_run

PATIENCE_S = 150

# runs in every process of the command, before anything of ours
KILLED_WRITER = """
import os, signal
if os.environ.get("RANK") == "1":
    import torch.distributed.checkpoint.filesystem as filesystem
    write, calls = filesystem._FileSystemWriter.write_data, []

    def half(self, plan, planner):
        done = write(self, plan, planner)
        calls.append(done.wait())
        if len(calls) == 2:
            for name in os.listdir(self.path):
                if name.startswith("__1_"):
                    file = os.path.join(self.path, name)
                    os.truncate(file, os.path.getsize(file) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    filesystem._FileSystemWriter.write_data = half
"""
BROKEN_RANK = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from vocabtp.cache import TeacherLogitCache
    store, calls = TeacherLogitCache.store.__func__, []

    def broken(cls, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the memory of this rank has rotted")
        return store(cls, *args, **options)

    TeacherLogitCache.store = classmethod(broken)
"""
# rank 1 does something in its third call of what belongs to one phase
IN_A_PHASE = """
import os, signal
if os.environ.get("RANK") == "1":
    import torch
    import torch.distributed.checkpoint.filesystem as filesystem
    import vocabtp.opsd.step as step
    from vocabtp.opsd.engine import TorchEngine
    from vocabtp.opsd.engine.deepspeed_engine import DeepSpeedEngine
    from vocabtp.opsd.teacher import Teacher
    owner, name = {place}
    calls, call = [], getattr(owner, name)

    def third(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            {deed}
        return call(*args, **options)

    setattr(owner, name, third)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
OUT_OF_MEMORY = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB. GPU 1 has")'
PLACES = {
    "rollout": 'step, "generate"',
    "teacher": 'Teacher, "score"',
    "student": '{engine}, "backward"',
    "update": '{engine}, "step"',
    "save": 'filesystem._FileSystemWriter, "write_data"',
}


def start(path, *overrides, fault="", folder=None, launcher=("-m",)):
    """The train command in a process group of its own, as a shell starts it."""
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    source = [str(Path(__file__).parents[1] / f"packages/vocabtp-{p}/src") for p in LAYERS]
    if fault:
        (folder / "sitecustomize.py").write_text(fault)
        source = [str(folder), *source]
    # an installed wheel needs no path; a source tree does
    environ["PYTHONPATH"] = os.pathsep.join([*source, environ.get("PYTHONPATH", "")]).rstrip(":")
    command = [sys.executable, *launcher, "vocabtp.opsd", "train", str(path), *overrides]
    return subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


LAYERS = ("kernels", "dist", "cache", "opsd")


def end(process):
    """Exit code, output and errors; a process that hangs is ended with its whole group."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the command did not end\n{out}\n{err}")
    return process.returncode, out, err


def steps(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "train"]


def wait_for_steps(process, folder, count):
    limit = time.monotonic() + PATIENCE_S
    while len(steps(folder)) < count:
        if process.poll() is not None or time.monotonic() > limit:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            pytest.fail(f"no {count} steps\n{process.communicate()}")
        time.sleep(0.05)


def leftovers(path):
    """Processes that still run this configuration."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path) in entry.read_bytes().decode(errors="replace"):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("signum", "to"), [(signal.SIGINT, "group"), (signal.SIGTERM, "command")])
def test_a_signal_saves_and_ends_all_ranks(tmp_path, signum, to):
    path = tiny_run(
        tmp_path,
        parallel={"tp": 2, "nproc": 2},
        training={"max_steps": 100000, "lr_scheduler": "constant"},
    )
    out = tmp_path / "out"
    process = start(path)
    wait_for_steps(process, out, 3)
    began = time.monotonic()
    # a terminal signals the whole group, a supervisor the command alone
    (os.killpg if to == "group" else os.kill)(process.pid, signum)
    code, said, errors = end(process)
    assert time.monotonic() - began < 10
    assert code == 128 + signum, (said, errors)
    assert "Traceback" not in errors
    assert f"{signum.name}: stopped after step" in said
    [checkpoint] = (out / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{steps(out)[-1]['step']:08d}"
    assert (checkpoint / "COMPLETE").exists()
    assert not leftovers(path)


def uninterrupted(rank, world, path, overrides):
    run = recorded(path, *overrides)
    return run["losses"], run["weights"]


def test_a_writer_killed_in_the_middle_costs_only_its_checkpoint(ranks, tmp_path):
    path = tiny_run(
        tmp_path,
        rollout={"temperature": 1.0},
        parallel={"tp": 2, "nproc": 2},
        training={"max_steps": 6, "save_steps": 2, "keep_checkpoints": 9},
    )
    out, fault = tmp_path / "out", tmp_path / "fault"
    fault.mkdir()
    began = time.monotonic()
    code, _, errors = end(start(path, fault=KILLED_WRITER, folder=fault))
    assert time.monotonic() - began < PATIENCE_S
    assert code == 128 + signal.SIGKILL
    assert "[rank 1] killed by signal 9 (SIGKILL) in the save phase" in errors
    assert "Traceback" not in errors
    assert not leftovers(path)
    root = out / "checkpoints"
    assert sorted(p.name for p in root.iterdir()) == ["step-00000002", "step-00000004.partial"]
    kept = {p.name: p.read_bytes() for p in (root / "step-00000002").iterdir()}
    code, said, errors = end(start(path))
    assert code == 0, (said, errors)
    assert "step-00000004.partial passed over: its writer did not finish" in errors
    assert "step 3 is the next" in errors
    assert {p.name: p.read_bytes() for p in (root / "step-00000002").iterdir()} == kept
    whole = (f"training.save_dir={tmp_path / 'whole'}",)
    losses, weights = ranks(uninterrupted, 2, path, whole)[0]
    assert [row["loss"] for row in steps(out)] == losses
    again, same = ranks(uninterrupted, 2, path, ())[0]
    assert again == []
    assert all(torch.equal(same[name], weights[name]) for name in weights)


@pytest.mark.full
def test_a_writer_killed_beside_training_leaves_the_checkpoint_before(ranks, tmp_path):
    path = tiny_run(
        tmp_path,
        rollout={"temperature": 1.0},
        parallel={"tp": 2, "nproc": 2},
        training={"max_steps": 6, "save_steps": 2, "keep_checkpoints": 9, "async_save": True},
    )
    out, fault = tmp_path / "out", tmp_path / "fault"
    fault.mkdir()
    code, _, errors = end(start(path, fault=KILLED_WRITER, folder=fault))
    assert code == 128 + signal.SIGKILL
    assert "[rank 1] killed by signal 9 (SIGKILL)" in errors
    assert not leftovers(path)
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004.partial"]
    code, said, errors = end(start(path))
    assert code == 0, (said, errors)
    assert "step 3 is the next" in errors
    whole = (f"training.save_dir={tmp_path / 'whole'}", "training.async_save=false")
    losses, _ = ranks(uninterrupted, 2, path, whole)[0]
    logged = {row["step"]: row["loss"] for row in steps(out)}
    assert [logged[step] for step in sorted(logged)] == losses


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_accelerators=2")
LAUNCHERS = {"command": ("-m",), "torchrun": TORCHRUN}
ENGINES = {"torch": "TorchEngine", "deepspeed": "DeepSpeedEngine"}


def launched(by):
    """Words in front of the module that starts a run."""
    if by != "deepspeed":
        return LAUNCHERS[by]
    # its port is the same for every run unless it is told one, and tests run side by side
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return (*DEEPSPEED, f"--master_port={free.getsockname()[1]}", "--module")


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "launcher"),
    [
        ("torch", "command"),
        ("torch", "torchrun"),
        ("deepspeed", "command"),
        ("deepspeed", "deepspeed"),
    ],
)
@pytest.mark.parametrize("phase", PLACES)
def test_a_rank_killed_in_a_phase_ends_the_run_and_resumes(
    ranks, tmp_path, monkeypatch, phase, launcher, engine
):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed's launcher asks
    path = tiny_run(
        tmp_path,
        rollout={"temperature": 1.0},
        parallel={"tp": 2, "engine": engine} | ({"nproc": 2} if launcher == "command" else {}),
        training={"max_steps": 4, "save_steps": 1, "train_batch_size": 1, "keep_checkpoints": 9},
    )
    out, fault = tmp_path / "out", tmp_path / "fault"
    fault.mkdir()
    place = PLACES[phase].format(engine=ENGINES[engine])
    source = IN_A_PHASE.format(place=place, deed=KILLED)
    process = start(path, fault=source, folder=fault, launcher=launched(launcher))
    wait_for_steps(process, out, 2)
    began = time.monotonic()
    code, _, errors = end(process)
    assert time.monotonic() - began < 60
    where = "save phase" if phase == "save" else f"{phase} phase of step 3"
    if launcher == "command":
        assert code == 128 + signal.SIGKILL
        said = f"[rank 1] killed by signal 9 (SIGKILL) in the {where}"
    else:
        assert code != 0
        said = f"[rank 0] rank 1 was killed in the {where}"
    assert said in errors
    assert not leftovers(path)
    left = sorted(p.name for p in (out / "checkpoints").iterdir())
    broken = ["step-00000003.partial"] if phase == "save" else []
    assert left == ["step-00000001", "step-00000002", *broken]
    code, said, errors = end(start(path, launcher=launched(launcher)))
    assert code == 0, (said, errors)
    assert "step 3 is the next" in errors
    losses, _ = ranks(uninterrupted, 2, path, (f"training.save_dir={tmp_path / 'whole'}",))[0]
    assert [row["loss"] for row in steps(out)] == losses


def test_a_rank_that_fails_is_named_and_takes_the_others_along(tmp_path):
    path = tiny_run(tmp_path, parallel={"tp": 2, "nproc": 2}, training={"max_steps": 50})
    fault = tmp_path / "fault"
    fault.mkdir()
    process = start(path, fault=BROKEN_RANK, folder=fault)
    wait_for_steps(process, tmp_path / "out", 0)
    code, _, errors = end(process)
    assert code == 1
    first = next(line for line in errors.splitlines() if line.strip())
    assert "[rank 1] RuntimeError: the memory of this rank has rotted" in first
    assert not leftovers(path)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_out_of_memory_names_phase_and_keys_and_takes_the_others_along(tmp_path, engine):
    path = tiny_run(
        tmp_path,
        parallel={"tp": 2, "nproc": 2, "engine": engine},
        training={"max_steps": 4, "save_steps": 1, "train_batch_size": 1},
    )
    fault = tmp_path / "fault"
    fault.mkdir()
    place = PLACES["student"].format(engine=ENGINES[engine])
    source = IN_A_PHASE.format(place=place, deed=OUT_OF_MEMORY)
    code, _, errors = end(start(path, fault=source, folder=fault))
    assert code == 2
    assert "[rank 1] out of memory in the student phase of step 3: " in errors
    for key in ("distillation.chunk_size", "training.micro_batch_size_per_gpu"):
        assert key in errors
    assert "Traceback" not in errors
    assert not leftovers(path)
    names = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
