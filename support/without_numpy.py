"""Run a program where numpy cannot be imported: torch alone does not bring it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

# torch looks for numpy as it is imported, and says so once if there is none
PREFIX = """
import os, sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
torch.set_num_threads(1)
try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise SystemExit("numpy is there")
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""
# gloo's threads now and then abort a process that shuts its interpreter down after all its work
SUFFIX = """
print("done", flush=True)
os._exit(0)
"""


def run(program: str, world: int, folder: Path, limit: float = 120.0) -> None:
    """Run `program` on `world` ranks, with `rank`, `world` and `folder` set; all must succeed."""
    command = [sys.executable, "-c", PREFIX + program + SUFFIX]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    end = time.monotonic() + limit
    procs = []
    try:
        for rank in range(world):
            out = (folder / f"out{rank}").open("wb")
            arguments = [*command, str(rank), str(world), str(folder)]
            with out:
                procs.append(subprocess.Popen(arguments, stdout=out, stderr=out, env=env))
        while any(proc.poll() is None for proc in procs) and time.monotonic() < end:
            if any(proc.poll() for proc in procs):
                break  # its peers would wait for it
            time.sleep(0.05)
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
            proc.wait()
    said = [(folder / f"out{rank}").read_text() for rank in range(world)]
    assert all(text.endswith("done\n") for text in said), "\n".join(said)
