"""What each rank is doing, told by the rank itself, for when it cannot tell any more.

A rank keeps one short file in a folder that the ranks of its machine share: its process id and its
phase. The parent of the ranks reads it where a rank was killed; under other launchers, and while
the parent waits, the other ranks do. Out of memory is a matter of phases too: the message names the
one that was under way, and the keys that make it smaller.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from vocabtp.opsd import launch
from vocabtp.opsd._console import complain
from vocabtp.opsd.errors import DeviceMemoryError, Interrupted, RankLostError

_KNOBS = {
    "load": "raise parallel.tp, or set teacher.offload_to_cpu or parallel.shard zero3 (with "
    "parallel.engine deepspeed zero2, and parallel.teacher_shard zero3)",
    "rollout": "lower training.micro_batch_size_per_gpu or rollout.max_response_length",
    "teacher": "lower training.micro_batch_size_per_gpu, or set teacher.payload hidden or "
    "teacher.offload_to_cpu",
    "student": "set training.activation_checkpointing, or lower teacher.prefetch_bytes, "
    "distillation.chunk_size or training.micro_batch_size_per_gpu",
    "update": "raise parallel.tp, or set parallel.shard zero2 or teacher.offload_to_cpu",
    "evaluation": "lower training.micro_batch_size_per_gpu or rollout.max_response_length",
    "save": "lower training.micro_batch_size_per_gpu, or raise parallel.tp",
}
_WAIT_S = 2.0  # a killed process is gone a little after its connections are
_GRACE_S = 5.0  # for a rank to end by the error that a broken connection brings


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank of this machine that ended in the middle of the run."""

    rank: int
    phase: str
    failed: bool  # by an error that it reports itself, not by a signal

    def __str__(self) -> str:
        how = "failed" if self.failed else "was killed"
        return f"rank {self.rank} {how}" + (f" in the {self.phase}" if self.phase else "")


class Phases:
    """The phases of this rank, and those of its peers on this machine.

    Args:
        environ: Of this process: whether it is one of several ranks, and which.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.rank, self.world = launch.rank(environ), launch.world_size(environ) or 1
        self.folder = _folder(environ) if self.world > 1 else None
        self.step: int | None = None  # the optimizer step under way, from 1
        self._now = ""
        # a folder may hold files of an earlier run: who was never seen alive cannot be lost
        self._seen: dict[int, int] = {}
        self._tell()

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """While entered, this rank is in phase `name`.

        Raises:
            DeviceMemoryError: On this rank alone, which cannot take part in any exchange: the
                launcher ends the others.
        """
        before, self._now = self._now, name
        self._tell()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            # what was asked for, without the allocator's advice
            reason = ". ".join(" ".join(str(error).split()).split(". ")[:2])
            raise DeviceMemoryError(
                f"out of memory in the {self.describe()}: {_KNOBS[name]}"
                + (f" ({reason})" if reason else "")
            ) from error
        finally:
            # an exception leaves the phase, but its reader has to know where it came from
            self._now = before
        self._tell()

    @contextmanager
    def watch_peers(self, on_lost: Callable[[Lost], None] | None = None) -> Iterator[None]:
        """While entered, a peer that is gone ends this rank too, at most seconds later.

        Args:
            on_lost: Called in place of ending this process.

        Raises:
            RankLostError: A connection broke because a rank is gone; names rank and phase.
        """
        done = threading.Event()
        self.lost()  # sees the peers
        if self.folder is not None:
            arguments = (done, on_lost or self._end)
            threading.Thread(target=self._look, args=arguments, daemon=True).start()
        try:
            yield
        except Interrupted:
            self._tell("left")
            raise
        except Exception as error:
            self._tell("failed")
            if self.folder is not None:
                _speak_before_the_end()
            if launch.is_echo(str(error)) and (lost := self.lost(_WAIT_S)) is not None:
                raise RankLostError(str(lost)) from error
            raise
        else:
            self._tell("left")
        finally:
            done.set()

    def lost(self, wait_s: float = 0.0) -> Lost | None:
        """A peer on this machine that is gone, or about to go; waits a little for one."""
        end = time.monotonic() + wait_s
        while True:
            records = {} if self.folder is None else read_records(self.folder, self.world)
            for rank, (pid, state, phase) in records.items():
                if rank == self.rank or state == "left":
                    continue
                if _alive(pid):
                    self._seen[rank] = pid
                elif self._seen.get(rank) == pid:
                    return Lost(rank, phase, failed=state == "failed")
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def describe(self) -> str:
        """The phase in words."""
        if not self._now:
            return "" if self.step is None else f"midst of step {self.step}"
        within = self._now in ("rollout", "teacher", "student", "update")
        return f"{self._now} phase" + (f" of step {self.step}" if within and self.step else "")

    def _look(self, done: threading.Event, on_lost: Callable[[Lost], None]) -> None:
        while not done.wait(1.0):
            if (lost := self.lost()) is not None:
                if not done.wait(_GRACE_S):
                    on_lost(lost)
                return

    def _end(self, lost: Lost) -> None:
        failure = launch.Failure(self.rank, "lost", str(lost), 1, time.time())
        if launch.has_parent():
            launch.leave_note(failure)
        else:
            complain(f"[rank {self.rank}] {failure.message}")
        os._exit(1)

    def _tell(self, state: str = "") -> None:
        if self.folder is None:
            return
        # what an error left last stays: the phase it came from
        line = "" if state == "failed" else f"{self.describe():64.64}"
        with suppress(OSError):  # a full disk must not end a run that writes nothing of worth here
            handle = os.open(_file(self.folder, self.rank), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, f"{os.getpid():10} {state:6} {line}".encode(), 0)
            finally:
                os.close(handle)


def _speak_before_the_end() -> None:
    """Let this rank tell why it fails, also where its launcher ends it because a peer has failed.

    Launchers send SIGTERM to the others as soon as one rank is gone, so it may come in between.
    """
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(signum: int, frame: FrameType | None) -> None:
    timer = threading.Timer(_GRACE_S, os._exit, (128 + signum,))
    timer.daemon = True
    timer.start()


def read_records(folder: Path, world: int) -> dict[int, tuple[int, str, str]]:
    """Process id, state (empty, `left` or `failed`) and phase of the ranks of this machine."""
    out = {}
    for rank in range(world):
        with suppress(OSError, ValueError):
            text = _file(folder, rank).read_text("utf-8")
            out[rank] = (int(text[:10]), text[11:17].strip(), text[18:].strip())
    return out


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.phase"


def _folder(environ: Mapping[str, str]) -> Path | None:
    """Shared by the ranks of this machine that one process started; None where it cannot be."""
    if launch.has_parent(environ):
        return launch.notes_folder(environ)
    # the port: a shell may be the parent of two runs
    run = f"{os.getppid()}-{environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir(), f"vocabtp-opsd-{os.getuid()}-{run}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    # someone else's folder of that name is not to be trusted
    return folder if folder.stat().st_uid == os.getuid() else None


def _alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to notice its end does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )
