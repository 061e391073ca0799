"""The files of a checkpoint: a directory that is either whole or not there.

    checkpoints/step-00000004/
        .metadata, __0_0.distcp, ...   tensors of model, optimizer, random states (torch's format)
        state.json                     step, counters, the configuration, the data's fingerprint
        COMPLETE                       names and sizes of the files above, written last

A checkpoint is written under the name `step-00000004.partial`, flushed to disk and renamed. What
is not named so, lacks COMPLETE, or does not hold what COMPLETE lists, is passed over on resume.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial"
_MARK = "COMPLETE"
_STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says beside its tensors."""

    step: int  # optimizer steps done
    counters: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)  # fingerprint of each data file
    layout: dict[str, int] = field(default_factory=dict)
    before: dict[str, Any] | None = None  # the evaluation before the first step


def path_of(root: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return root / f"step-{step:08d}"


def unfinished(final: Path) -> Path:
    """Where it lies while it is being written."""
    return final.with_name(final.name + _PARTIAL)


def found(root: Path) -> list[Path]:
    """What lies there under the names of checkpoints, whole or not, the newest last."""
    return sorted(root.glob("step-*"))


def read_saved(path: Path) -> Saved:
    """What a whole checkpoint says beside its tensors."""
    return Saved(**json.loads((path / _STATE).read_text("utf-8")))


def fault(path: Path) -> str:
    """Why this directory is not a whole checkpoint; empty if it is one."""
    if path.name.endswith(_PARTIAL):
        return "its writer did not finish"
    if not _NAME.fullmatch(path.name):
        return "its name is not that of a checkpoint"
    try:
        sizes = json.loads((path / _MARK).read_text("utf-8"))
    except FileNotFoundError:
        return f"it has no file {_MARK}"
    except (OSError, ValueError) as error:
        return f"its file {_MARK} cannot be read: {error}"
    if not isinstance(sizes, dict) or not {_STATE, ".metadata"} <= sizes.keys():
        return f"its file {_MARK} does not list what a checkpoint has"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != size:
            return f"file {name} has {file.stat().st_size} bytes instead of {size}"
    try:
        read_saved(path)
    except (OSError, TypeError, ValueError) as error:
        return f"its file {_STATE} cannot be read: {error}"
    return ""


def begin(partial: Path) -> None:
    """Make an empty directory for the tensors of a new checkpoint."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def complete(partial: Path, final: Path, saved: Saved, keep: int) -> None:
    """Turn the directory, which holds the tensors, into a whole checkpoint.

    Args:
        partial: Where the tensors are.
        final: Its name from now on, in the same directory.
        saved: What to say beside the tensors.
        keep: How many whole checkpoints to keep there, this one included.
    """
    root = final.parent
    _write(partial / _STATE, json.dumps(vars(saved), indent=1))
    sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    _write(partial / _MARK, json.dumps(sizes, indent=1))
    _sync_directory(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync_directory(root)
    whole = [p for p in found(root) if not fault(p)]
    # what an earlier writer left half done is of no use once there is a newer whole one
    for old in [*whole[:-keep], *root.glob(f"step-*{_PARTIAL}")]:
        shutil.rmtree(old)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
