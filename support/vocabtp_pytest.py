"""pytest plugin of this repository: run a function on N gloo ranks, with a deadline."""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import pytest

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


_preload = ["torch", "torch.distributed"]
_A_MODEL = "transformers.models.qwen2.modeling_qwen2"


def _load(path: str, qualname: str):
    """The function by file and name: pickling one breaks under --import-mode=importlib."""
    name = "_rank_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    obj = module
    for part in qualname.split("."):
        obj = getattr(obj, part)
    return obj


def _entry(path, qualname, rank, world, root, limit, args):
    import torch
    import torch.distributed as dist

    stack = open(f"{root}/stack{rank}", "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.dump_traceback_later(limit * 0.8, file=stack)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{root}/store", world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=limit * 0.7),
        )
        result = _load(path, qualname)(rank, world, *args)
        Path(f"{root}/out{rank}").write_bytes(pickle.dumps(result))
        # a rank that leaves early would reset its peers' connections mid-collective
        dist.barrier()
    except BaseException:
        Path(f"{root}/err{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # gloo threads sometimes abort during interpreter shutdown, after all work is done
    os._exit(0)


def _report(root: str, world: int, codes: list[int | None], hung: list[int]) -> str:
    text = [f"exit codes {codes}, stopped at the deadline: {hung}"]
    for kind in ("err", "stack"):
        for rank in range(world):
            file = Path(root, f"{kind}{rank}")
            if file.exists() and (body := file.read_text().strip()):
                text.append(f"--- rank {rank} {kind}\n{body}")
    return "\n".join(text)


@pytest.fixture
def ranks(tmp_path):
    """Call ranks(fn, world, *args): fn(rank, world, *args) on every rank, results in rank order.

    `fn` is a module-level function. A rank that raises, dies or hangs fails the test within
    `limit` seconds with the traceback or stack of every rank.
    """

    def call(fn, world, *args, limit=60.0):
        ctx = mp.get_context("forkserver")
        ctx.set_forkserver_preload(_preload)
        root = str(tmp_path / f"ranks{time.monotonic_ns()}")
        os.makedirs(root)
        place = (fn.__code__.co_filename, fn.__qualname__)
        procs = [
            ctx.Process(target=_entry, daemon=True, args=(*place, r, world, root, limit, args))
            for r in range(world)
        ]
        for p in procs:
            p.start()
        end, failed = time.monotonic() + limit, False
        live = {p.sentinel: p for p in procs}
        while live and not failed and time.monotonic() < end:
            for s in wait(list(live), timeout=max(0.0, end - time.monotonic())):
                p = live.pop(s)
                p.join()
                failed |= p.exitcode != 0
        if failed:  # give peers a moment to report, then stop them
            wait(list(live), timeout=1.0)
        codes = [p.exitcode for p in procs]
        hung = [r for r, code in enumerate(codes) if code is None]
        for p in procs:
            p.kill()
            p.join()
        if failed or hung:
            pytest.fail(_report(root, world, codes, hung), pytrace=False)
        return [pickle.loads(Path(root, f"out{r}").read_bytes()) for r in range(world)]

    return call


LAYERS = ["kernels", "dist", "cache", "opsd"]  # lowest first


def pytest_addoption(parser):
    parser.addoption("--layer", choices=LAYERS, help="refuse to run if a higher layer is there")
    parser.addoption("--full", action="store_true", help="also run the tests marked 'full'")


def wrong_layers(layer, find_spec=importlib.util.find_spec):
    """Why these are not `layer` and the ones below it alone, or None."""
    for i, name in enumerate(LAYERS):
        # asking for a.b imports a
        there = find_spec("vocabtp") is not None and find_spec(f"vocabtp.{name}") is not None
        if there != (i <= LAYERS.index(layer)):
            return f"vocabtp.{name} {'is importable' if there else 'cannot be imported'}"
    return None


def pytest_configure(config):
    """With --layer, prove that this layer and the ones below are importable and no other is."""
    layer = config.getoption("layer")
    if layer is not None and (wrong := wrong_layers(layer)):
        raise pytest.UsageError(f"--layer={layer}: {wrong}")


def pytest_collection_modifyitems(config, items):
    """Drop what this run did not ask for: a skipped test would hide a run of nothing."""
    if any({"vocabtp-opsd", "tests-integration"} & set(i.path.parts) for i in items):
        # seconds of every rank of every test otherwise
        _preload.extend(["torch.distributed.tensor.parallel", _A_MODEL, "vocabtp.opsd.trainer"])
    wanted = config.getoption("markexpr")
    drop = [m for m in ("gpu", "full") if m not in wanted]
    if config.getoption("--full"):
        drop.remove("full")
    out = [i for i in items if any(i.get_closest_marker(m) for m in drop)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in out]
