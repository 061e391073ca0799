"""The JSON file of results: runs, one object a measurement, and how runs come together.

A file holds `runs` (hardware, versions, commit, copy bandwidth; no host) and `results`, each with
the number of its run. A measurement that a later run repeats replaces the earlier one.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

SCHEMA = 2
Result = dict[str, Any]

_KEY = ("kind", "device", "op", "mode", "arm", "dtype", "layout", "rows", "cols", "world")


def key(result: Result) -> tuple[object, ...]:
    """What identifies a measurement."""
    return tuple(result.get(name) for name in _KEY)


class Results:
    """A file of results that grows while a run goes on."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        self.found: dict[tuple[object, ...], Result] = {}
        if path.exists():
            loaded = load(path)
            self.runs = loaded["runs"]
            self.found = {key(result): result for result in loaded["results"]}
        self.run = {"id": 1 + max((r["id"] for r in self.runs), default=0), **run}
        self.runs.append(self.run)

    def has(self, result: Result) -> bool:
        """Whether a file holds this measurement, and it was no failure."""
        known = self.found.get(key({"device": self.run["device"], **result}))
        return known is not None and known["status"] == "ok"

    def add(self, result: Result) -> None:
        """One more measurement of this run."""
        whole = {"device": self.run["device"], **result, "run": self.run["id"]}
        self.found[key(whole)] = {k: v for k, v in whole.items() if v is not None}

    def save(self) -> None:
        """Write the file; a reader never sees half of it."""
        used = {result["run"] for result in self.found.values()} | {self.run["id"]}
        runs = ",\n".join(json.dumps(run) for run in self.runs if run["id"] in used)
        lines = ",\n".join(json.dumps(result) for result in self.found.values())
        text = f'{{"schema": {SCHEMA},\n"runs": [\n{runs}\n],\n"results": [\n{lines}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")
        half.write_text(text, encoding="utf-8")
        os.replace(half, self.path)


def load(path: Path) -> dict[str, Any]:
    """A file that `save` wrote."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if loaded.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {loaded.get('schema')}")
    return loaded


def facts(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Where a run takes place, when, and of which commit."""
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = None
    name = "cpu"
    if device.type != "cpu":
        name = str(torch.get_device_module(device).get_device_name(device))
    return {
        "device": name,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
