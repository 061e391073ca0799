"""Ranks on this machine: starting them, ending them, and telling whose fault it was.

The parent starts the ranks through torch's elastic launcher, as torchrun does, without its log
output. A rank under our parent says nothing when it fails: it leaves a note in a folder, and the
parent prints the one that came first. Three things end a rank that would wait for ever: the
parent's monitor (a peer died), the parent's signal (Ctrl-C), and the rank's own watch on its
parent (the parent was killed).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from vocabtp.opsd._console import complain

MODULE = "vocabtp.opsd"  # what a rank runs
_NOTES = "VOCABTP_OPSD_NOTES"
# errors of the libraries that carry messages between ranks: they tell of a peer's end, not why
_CARRIERS = ("gloo", "nccl", "connection", "tcpstore", "broken pipe", "timed out", "timeout")
_GRACE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended; `code` is its exit code.

    `user`: input has to change; `crash`; `signal`; `lost`: another rank is gone.
    """

    rank: int
    kind: Literal["user", "crash", "signal", "lost"]
    message: str
    code: int
    time: float = 0.0
    trace: str = ""

    @property
    def is_echo(self) -> bool:
        """True if it only reports that another rank went away."""
        return self.kind == "lost" or (self.kind == "crash" and is_echo(self.message))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: exit code, and the failure to show (None after success or a signal)."""

    code: int
    failure: Failure | None = None
    shared: bool = False  # not one rank's own: its message goes without the rank


def is_echo(message: str) -> bool:
    """True for the words of a library that carries messages: a peer is gone."""
    text = message.lower()
    return any(word in text for word in _CARRIERS)


def world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks that torchrun started, this process among them; None outside it."""
    return int(environ["WORLD_SIZE"]) if "WORLD_SIZE" in environ else None


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's rank; 0 outside torchrun."""
    return int(environ.get("RANK", "0"))


def has_parent(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a rank that `launch` started."""
    return _NOTES in environ


def notes_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the ranks of `launch` leave what their parent reads."""
    return Path(environ[_NOTES])


def leave_note(failure: Failure, *, wait_s: float = 3.0) -> None:
    """Tells the parent why this rank ends.

    Wrong input is usually wrong for every rank; the first one to see it waits for the others'
    notes before it ends, because the parent stops them as soon as it does.
    """
    folder = Path(os.environ[_NOTES])
    temporary = folder / f"{failure.rank}.tmp"
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(failure)), encoding="utf-8")
        os.replace(temporary, folder / f"{failure.rank}.json")
    except OSError:  # the parent is gone, and its folder with it
        complain(f"[rank {failure.rank}] {failure.message}")
        return
    end = time.monotonic() + (wait_s if failure.kind == "user" else 0.0)
    while time.monotonic() < end and len(list(folder.glob("*.json"))) < (world_size() or 1):
        time.sleep(0.05)


def watch_parent(poll_s: float = 1.0, on_orphan: Callable[[], None] | None = None) -> None:
    """Ends this process if its parent goes away: SIGTERM first, the hard way after 30 seconds.

    Args:
        poll_s: Seconds between two looks.
        on_orphan: Called in place of the above.
    """
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        (on_orphan or _end_orphan)()

    threading.Thread(target=look, name="vocabtp-watch-parent", daemon=True).start()


def launch(nproc: int, arguments: Sequence[str]) -> Outcome:
    """Runs `python -m vocabtp.opsd ARGUMENTS` on `nproc` ranks of this machine.

    Ranks inherit standard input and output. SIGINT, SIGTERM, SIGHUP and SIGQUIT go on to every
    rank, which has 30 seconds to save and end. When one rank fails the others are ended.

    Args:
        nproc: Number of ranks.
        arguments: Command line after the program's name.

    Returns:
        The exit code to end with, and what to print.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _mute("torch.distributed")
    with tempfile.TemporaryDirectory(prefix="vocabtp-opsd-") as folder:
        os.environ[_NOTES] = folder
        # ranks share the cores; without this each would take all of them
        threads = max(1, (os.cpu_count() or 1) // nproc)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        # -P: a file in the working directory must not shadow a module
        command = ["-P", "-u", "-m", MODULE, *arguments]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            codes = {r: failure.exitcode for r, failure in error.failures.items()}
            return judge(codes, _read_notes(Path(folder)), _read_phases(Path(folder)))
        except SignalException as error:
            notes = {r: n for r, n in _read_notes(Path(folder)).items() if not n.is_echo}
            code = 128 + int(error.sigval)
            return judge({}, notes) if notes else Outcome(code)
        finally:
            os.environ.pop(_NOTES, None)
    return Outcome(0)


def judge(
    codes: Mapping[int, int], notes: Mapping[int, Failure], phases: Mapping[int, str] | None = None
) -> Outcome:
    """Picks the failure that the others follow from.

    Args:
        codes: Exit codes of the ranks that failed, negative for a signal, in the order seen.
        notes: What ranks left behind.
        phases: What ranks were doing.

    Returns:
        The code to end with and the failure to show. A run that only ended by a signal in good
        order has a code above 128 and nothing to show.
    """
    spoken = sorted(notes.values(), key=lambda note: note.time)
    doing = phases or {}
    silent = [_silent(r, code, doing.get(r, "")) for r, code in codes.items() if r not in notes]
    first = min([*spoken, *silent], key=_blame)
    if first.kind == "crash" and first.code > 128:
        return Outcome(first.code)
    shared = first.kind == "user" and all(n.message == first.message for n in spoken)
    return Outcome(first.code, first, shared and len(spoken) > 1)


def _blame(failure: Failure) -> int:
    """0 for a cause, then what may be one, what repeats one, what the parent ended."""
    if failure.kind == "signal":
        return {128 + signal.SIGTERM: 3, 128 + signal.SIGKILL: 1}.get(failure.code, 0)
    if failure.code > 128:
        return 4
    if failure.is_echo:
        return 2
    return 0 if failure.time else 1


def _silent(r: int, code: int, phase: str) -> Failure:
    where = f" in the {phase}" if phase else ""
    if code >= 0:
        return Failure(r, "crash", f"ended with exit code {code}{where}", code)
    name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else "?"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return Failure(r, "signal", f"killed by signal {-code} ({name}){where}{hint}", 128 - code)


def _read_notes(folder: Path) -> dict[int, Failure]:
    notes = [Failure(**json.loads(p.read_text("utf-8"))) for p in folder.glob("*.json")]
    return {note.rank: note for note in notes}


def _read_phases(folder: Path) -> dict[int, str]:
    from vocabtp.opsd.phases import read_records

    ranks = [int(file.stem) for file in folder.glob("*.phase")]
    records = read_records(folder, max(ranks, default=-1) + 1)
    return {r: phase for r, (_, _, phase) in records.items()}


def _mute(prefix: str) -> None:
    # each module's logger has a level of its own, so that their parent's would not reach them
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefix):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _end_orphan() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
