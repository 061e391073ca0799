"""The command line: `vocabtp-opsd COMMAND CONFIG [section.key=value ...]`.

Exit codes: 0 done; 1 a crash; 2 something in the input has to change; 128 + n ended by signal n.
Errors are one line on standard error, from one rank. Configuration and prompts are checked before
torch or transformers are imported and before any rank is started.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vocabtp.opsd import launch
from vocabtp.opsd._console import Notices, complain, say
from vocabtp.opsd._keys import all_keys
from vocabtp.opsd._version import __version__
from vocabtp.opsd._wording import shown
from vocabtp.opsd.config import Config, load_config
from vocabtp.opsd.data import load_examples
from vocabtp.opsd.errors import ConfigError, Interrupted, RankLostError, UserError

if TYPE_CHECKING:
    from vocabtp.opsd.trainer import Trainer

PROGRAM = "vocabtp-opsd"
_log = logging.getLogger("vocabtp.opsd")

_COMMANDS = {
    "train": "distil the teacher into the student",
    "check": "do all that train does before its first step, print the configuration, stop",
    "eval": "exact match and KL of the student on data.eval_path",
    "rollout": "write the student's answers to the training prompts as JSONL",
    "export": "write the newest checkpoint as a plain Hugging Face directory",
    "doctor": "print versions and devices, and test that two ranks can talk",
}
# what takes the student alone, and writes a file or a directory
_WITHOUT_TEACHER = ("rollout", "export")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command; ends the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # what DeepSpeed's launcher says besides the environment
    arguments = [a for a in arguments if not re.fullmatch(r"--local[_-]rank=\d+", a)]
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.world_size() is not None:
        # communication threads sometimes abort while the interpreter shuts down, work done
        os._exit(code)
    raise SystemExit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; prints its error, if any, and returns the exit code."""
    try:
        options = _parse(arguments)
    except _Stop as stop:
        return stop.code
    notices = _prepare()
    try:
        if options.command == "doctor":
            from vocabtp.opsd.doctor import doctor

            return doctor(options.config, options.overrides)
        return _run_configured(options, arguments, notices)
    except BrokenPipeError:
        # whoever read our output has left (`... | head`); nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _failed(error, options.debug)
    except KeyboardInterrupt:
        return _failed(Interrupted(signal.SIGINT), options.debug)


def _run_configured(options: argparse.Namespace, arguments: Sequence[str], notices: Notices) -> int:
    teacher = options.command not in _WITHOUT_TEACHER
    config = load_config(options.config, options.overrides, teacher=teacher)
    world = _world(config)
    config = config.for_world(world)
    _check_inputs(config, options.command)
    if options.command in _WITHOUT_TEACHER:
        _check_output(Path(options.output), options.command)
    if world > 1 and launch.world_size() is None:
        return _show(launch.launch(world, arguments), options.debug)
    if launch.world_size() is not None:
        launch.watch_parent()
    from vocabtp.opsd.trainer import Trainer

    notices.heard = False
    return _ACTIONS[options.command](Trainer(config), config, options)


def _world(config: Config) -> int:
    started, wanted = launch.world_size(), config.parallel.nproc
    if started is not None and wanted is not None and started != wanted:
        raise ConfigError(
            f"parallel.nproc is {wanted}, but torchrun started {started} rank(s): "
            "leave one of the two out"
        )
    return started or wanted or 1


def _check_inputs(config: Config, command: str) -> None:
    """What can be wrong with files, before anything slow: all of it is read again later."""
    if command in ("train", "check", "rollout"):
        load_examples(config.data.path, config.data)
    if config.data.eval_path is not None and command in ("train", "check", "eval"):
        load_examples(config.data.eval_path, config.data, need_answer=True)
    elif command == "eval":
        raise ConfigError("data.eval_path is not set: eval needs held-out prompts with answers")
    if command in ("train", "check"):
        _check_writable(Path(config.training.save_dir))


def _check_writable(folder: Path) -> None:
    place = folder.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
    except OSError as error:  # a name that is too long, a loop of links
        raise ConfigError(f"training.save_dir: {error.strerror}: {shown(str(folder))}") from None
    if not place.is_dir():
        raise ConfigError(f"training.save_dir: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"training.save_dir: cannot write in {place}")


def _check_output(path: Path, command: str) -> None:
    try:
        if command == "rollout" and path.is_dir():
            raise ConfigError(f"--output: {path} is a directory; name a JSONL file")
        if command == "export" and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--output: {path} is there already; name a new directory")
        folder = next(p for p in path.absolute().parents if p.exists())
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--output: {error}") from None
    if not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file")


def _train(trainer: Trainer, config: Config, options: argparse.Namespace) -> int:
    trainer.train()
    return 0


def _check(trainer: Trainer, config: Config, options: argparse.Namespace) -> int:
    facts = trainer.check()
    if launch.rank() == 0:
        # comments, so that the output is a configuration
        for name, value in facts.items():
            say(f"# {name}: {value}")
        say(config.dump().rstrip())
    return 0


def _eval(trainer: Trainer, config: Config, options: argparse.Namespace) -> int:
    result = trainer.evaluate()
    if launch.rank() == 0:
        for name, value in result.items():
            say(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


def _rollout(trainer: Trainer, config: Config, options: argparse.Namespace) -> int:
    trainer.rollout(options.output)
    if launch.rank() == 0:
        say(options.output)
    return 0


def _export(trainer: Trainer, config: Config, options: argparse.Namespace) -> int:
    trainer.export(options.output)
    if launch.rank() == 0:
        say(options.output)
    return 0


_ACTIONS: dict[str, Callable[[Trainer, Config, argparse.Namespace], int]] = {
    "train": _train,
    "check": _check,
    "eval": _eval,
    "rollout": _rollout,
    "export": _export,
}


class _Stop(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = f"see {self.prog} --help"
        if option := re.match(r"unrecognized arguments: --([\w-]+)", message):
            name = option[1].replace("-", "_")
            keys = [key for key in all_keys() if key.rpartition(".")[2] == name]
            if keys:
                hint = f"write {' or '.join(f'{key}=VALUE' for key in keys)}"
        _print_error(f"{message} ({hint})")
        raise _Stop(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            complain(message.rstrip())
        raise _Stop(status)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, _COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, text in _COMMANDS.items())
    top = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND CONFIG [section.key=value ...] [--debug]",
        description=f"On-policy distillation of language models.\n\ncommands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    top.add_argument("command", metavar="COMMAND", choices=_COMMANDS)
    command = top.parse_args(arguments[:1]).command
    parser = _Parser(prog=f"{PROGRAM} {command}", description=_COMMANDS[command])
    count = "?" if command == "doctor" else None
    parser.add_argument("config", nargs=count, metavar="CONFIG", help="YAML or JSON file")
    # with a default of its own, or argparse lists it among what is required and missing
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="replace a key"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    if command in _WITHOUT_TEACHER:
        kind = "JSONL file" if command == "rollout" else "directory"
        parser.add_argument("--output", required=True, help=f"{kind} to write")
    options = parser.parse_intermixed_args(arguments[1:])
    options.command = command
    return options


def _prepare() -> Notices:
    """Notices from one rank only, none that its parent gave; libraries quiet."""
    _log.setLevel(logging.ERROR if launch.rank() != 0 else logging.INFO)
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False
    notices = Notices(heard=launch.has_parent())
    _log.handlers[0].filters = [notices]
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return notices


def _failed(error: BaseException, debug: bool) -> int:
    rank = launch.rank()
    if isinstance(error, Interrupted):
        return 128 + error.signum
    trace = "".join(traceback.format_exception(error)) if debug else ""
    if isinstance(error, UserError):
        failure = launch.Failure(rank, "user", str(error), 2, time.time(), trace)
    elif isinstance(error, RankLostError):
        failure = launch.Failure(rank, "lost", str(error), 1, time.time(), trace)
    else:
        text = " ".join(str(error).split())
        message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        failure = launch.Failure(rank, "crash", message, 1, time.time(), trace)
    if launch.has_parent():
        launch.leave_note(failure)
        return failure.code
    if failure.kind == "user" and rank != 0:
        # rank 0 says the same, and torchrun ends this rank as soon as it does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3.0)
    nameless = launch.world_size() is None or (failure.kind == "user" and rank == 0)
    return _show(launch.Outcome(failure.code, failure, shared=nameless), debug)


def _show(outcome: launch.Outcome, debug: bool) -> int:
    failure = outcome.failure
    if failure is None:
        if outcome.code > 128:
            complain(f"{PROGRAM}: ended by {signal.Signals(outcome.code - 128).name}")
        return outcome.code
    if failure.trace:
        complain(failure.trace.rstrip())
    where = "" if outcome.shared else f"[rank {failure.rank}] "
    caught = failure.kind == "crash" and failure.time > 0
    hint = " (--debug shows the traceback)" if caught and not debug else ""
    _print_error(f"{where}{failure.message}{hint}")
    return outcome.code


def _print_error(message: str) -> None:
    complain(f"{PROGRAM}: error: {message}")
