"""Checkpoints that are either whole or not there, and a resume that is exact.

`vocabtp.opsd.checkpoint_files` says what lies in a checkpoint's directory, and when it is whole.
Tensors carry qualified parameter names, so that another layout can read them; a tied weight is
stored once. Only tensors are pickled, and they are read with `weights_only`.

Written in the background, a checkpoint is first copied to the host, which is all that training
waits for. A thread then writes it, over a group of its own: its collectives must not mix with those
of the training. One is written at a time; its error comes with the next one, or at the end of the
run.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from vocabtp.opsd._background import Background
from vocabtp.opsd._tensor_reader import SafeReader
from vocabtp.opsd.checkpoint_files import (
    Saved,
    begin,
    complete,
    fault,
    found,
    path_of,
    unfinished,
)
from vocabtp.opsd.engine import Engine
from vocabtp.opsd.engine.places import place_of, wrapped
from vocabtp.opsd.errors import CheckpointError
from vocabtp.opsd.parallel import TIMEOUT, Layout
from vocabtp.opsd.sharding import sharding_of

_ALONE = "torch.distributed is disabled"  # a warning; a single process is not a mistake


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: The directory that holds them, the same for all ranks.
        layout: The ranks.
        keep: How many to keep; older ones are removed after a new one is whole.
    """

    def __init__(self, root: Path, layout: Layout, keep: int) -> None:
        self.root, self.layout, self.keep = root, layout, max(1, keep)
        self.lead = layout.dp_rank == 0 and layout.tp_rank == 0
        self.alone = layout.tp * layout.dp == 1
        self._group: dist.ProcessGroup | None = None  # of the background
        self._running: tuple[Path, Background] | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint after so many steps is, or would be."""
        return path_of(self.root, step)

    def save(
        self, module: nn.Module, engine: Engine, saved: Saved, *, background: bool = False
    ) -> Path:
        """Write a checkpoint; every rank takes part. Waits for the one before.

        Args:
            module: The student.
            engine: Its optimizer.
            saved: What to say beside the tensors; not changed by the caller afterwards.
            background: Return when everything is copied, and write while training goes on.

        Returns:
            Its final directory.

        Raises:
            CheckpointError: On every rank, when any rank could not write it, or the one before.
                Earlier checkpoints are as they were, and the message names the newest.
        """
        self.wait()
        final = self.path(saved.step)
        partial = unfinished(final)
        tensors = model_tensors(module) | engine.state_tensors() | self.rng()
        if not background:
            with self._tidy(partial), _quiet():
                self._write_whole(tensors, saved, partial, final, self.layout.world_group)
            return final
        if self._group is None and not self.alone:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        # a copy also where the tensors are on the host: the next step writes into them
        copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        group = self._group
        # not for a while only: filters belong to all threads
        warnings.filterwarnings("ignore", message=_ALONE)
        device = self.layout.device

        def write() -> None:
            if device.type != "cpu":  # a new thread begins with the first one
                torch.accelerator.set_device_index(device)
            self._write_whole(copies, saved, partial, final, group)

        self._running = (partial, Background(write))
        return final

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; every rank takes part.

        Raises:
            CheckpointError: On every rank, as `save`.
        """
        if self._running is not None:
            (partial, work), self._running = self._running, None
            with self._tidy(partial):
                work.wait()

    def give_time(self, seconds: float) -> None:
        """Let a checkpoint that is being written become whole, in a run that has failed."""
        if self._running is not None:
            self._running[1].ends_within(seconds)

    @contextlib.contextmanager
    def _tidy(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            kept = self.latest(lambda line: None)
            if self.lead:
                # on a full disk it would take the room of the next attempt
                shutil.rmtree(partial, ignore_errors=True)
            after = f"{kept} is still the newest" if kept else "there is no earlier one"
            raise CheckpointError(f"{error}; {after}") from error

    def _write_whole(
        self,
        tensors: dict[str, Tensor],
        saved: Saved,
        partial: Path,
        final: Path,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._lead("prepare", lambda: begin(partial), group)
        with _one_line(f"{partial}: could not be written"):
            save_tensors(
                tensors,
                storage_writer=FileSystemWriter(str(partial), sync_files=True),
                process_group=group,
                no_dist=self.alone,
            )
        self._lead("finish", lambda: complete(partial, final, saved, self.keep), group)

    def latest(self, say: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint, chosen by rank 0 for all.

        Args:
            say: Told, on rank 0, why each newer one was passed over.
        """
        choice: list[str | None] = [None]
        if self.lead:
            for path in reversed(found(self.root)):
                wrong = fault(path)
                if not wrong:
                    choice[0] = str(path)
                    break
                say(f"checkpoint {path} passed over: {wrong}")
        if not self.alone:
            dist.broadcast_object_list(choice, src=0, group=self.layout.world_group)
        return Path(choice[0]) if choice[0] else None

    def load(self, path: Path, module: nn.Module, engine: Engine | None) -> None:
        """Read model, optimizer and, at the layout that wrote them, random states.

        Args:
            path: A whole checkpoint, from `latest`.
            module: The student.
            engine: None to read the weights alone.

        Raises:
            CheckpointError: On every rank, when a file cannot be read or a tensor is missing.
        """
        with _one_line(f"{path}: could not be read"), _quiet():
            reader = SafeReader(str(path))
            known = reader.read_metadata().state_dict_metadata
            model = model_tensors(module)
            if missing := sorted(set(model) - set(known)):
                raise CheckpointError(f"{path}: has no tensor {missing[0]!r} for the student")
            rng, state = {}, {}
            if engine is not None:
                rng = {name: value for name, value in self.rng().items() if name in known}
                state = engine.empty_state(
                    [name for name in known if name.startswith("optimizer.")]
                )
            load_tensors(model | state | rng, storage_reader=reader, no_dist=self.alone)
        _take_over(module, model)
        if engine is not None:
            engine.load_state_tensors(state)
            self.set_rng(rng)

    def _lead(self, what: str, act: Callable[[], object], group: dist.ProcessGroup | None) -> None:
        """Let rank 0 act; its failure becomes the same error on every rank."""
        failure: list[str | None] = [None]
        if self.lead:
            try:
                act()
            except OSError as error:
                failure[0] = f"{self.root}: could not {what} a checkpoint: {error}"
        if not self.alone:
            dist.broadcast_object_list(failure, src=0, group=group)
        if failure[0]:
            raise CheckpointError(failure[0])

    def rng(self) -> dict[str, Tensor]:
        """This rank's random states, by names that tell the layout."""
        rank = self.layout.dp_rank * self.layout.tp + self.layout.tp_rank
        key = f"rng.tp{self.layout.tp}.dp{self.layout.dp}.rank{rank}"
        out = {f"{key}.cpu": torch.get_rng_state()}
        if self.layout.device.type != "cpu":
            module = torch.get_device_module(self.layout.device)
            out[f"{key}.device"] = module.get_rng_state(self.layout.device)
        return out

    def set_rng(self, rng: Mapping[str, Tensor]) -> None:
        """Take over what `rng` gave."""
        for name, value in rng.items():
            if name.endswith(".cpu"):
                torch.set_rng_state(value)
            else:
                module = torch.get_device_module(self.layout.device)
                module.set_rng_state(value, self.layout.device)


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied weight once.

    In the dtype that the module computes in: masters are the engine's to save.
    """
    once: dict[str, Tensor] = dict(module.named_parameters())
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(once)
    state = module.state_dict()
    sharding = sharding_of(module)
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in shared or not isinstance(value, Tensor):
            continue
        if name in once:
            if sharding is not None and name not in sharding.whole:
                value = value.to(sharding.dtype)
            value = wrapped(once[name], value)
        out[f"model.{name}"] = value
    return out


def _take_over(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what was read into parameters that are stored otherwise."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            read = tensors[f"model.{name}"]
            place = place_of(parameter)
            if place is not None and place.sizes is not None:
                parameter.copy_(place.unwrap(read))
            elif read.dtype != parameter.dtype:
                parameter.copy_(read)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        yield


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn what torch raises, on all ranks alike, into one line for the user.

    A RuntimeError stays one: it tells of a rank that went away, and whose fault that is, is not
    known here.
    """
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {cause}") from error
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what}: {error}") from error
