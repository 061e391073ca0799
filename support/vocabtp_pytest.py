"""pytest plugin of this repository: run a function on N ranks, with a deadline."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import pytest

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# imported once by the server that ranks are forked from, not once a rank; autograd with upstream
# gradients imports the third: seconds of sympy
_preload = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
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


def _implementation(backend, device):
    """The context in which a rank's calls of the kernels run on `backend`."""
    if backend is None:
        return contextlib.nullcontext()
    import triton_interpreter
    import vocabtp.kernels as vk

    if backend == "triton" and device is None:
        triton_interpreter.patch()
    return vk.backend(backend)


def _backends(device, hosts):
    """What the default group of ranks on these devices talks through."""
    import torch.distributed as dist

    if device is None:
        return "gloo"
    own = dist.get_default_backend_for_device(device)
    return f"cpu:gloo,{device}:{own}" if hosts else own


def _entry(path, qualname, rank, world, root, limit, backend, device, hosts, args):
    import torch
    import torch.distributed as dist

    stack = open(f"{root}/stack{rank}", "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.enable(file=stack)  # gloo aborts the process where sizes do not match
    # the parent asks for the stack; faulthandler answers even from inside a collective
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # an orphan (the parent was killed) ends by itself
    faulthandler.dump_traceback_later(limit + 5, exit=True, file=stack)
    try:
        torch.set_num_threads(1)
        if device is not None:
            torch.accelerator.set_device_index(rank)
            # as a launcher says it: whoever looks for a device of its own finds this one
            os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group(
            _backends(device, hosts),
            store=dist.FileStore(f"{root}/store", world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=limit * 0.7),
            device_id=None if device is None else torch.device(device, rank),
        )
        with _implementation(backend, device):
            result = _load(path, qualname)(rank, world, *args)
        Path(f"{root}/out{rank}").write_bytes(pickle.dumps(result))
        # a rank that leaves early would reset its peers' connections mid-collective
        dist.barrier()
    except BaseException:
        Path(f"{root}/err{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # gloo threads sometimes abort during interpreter shutdown, after all work is done
    os._exit(0)


def _wait(live, seconds, until_failure):
    """Join ranks that end within `seconds`; stop early at the first one that failed."""
    end = time.monotonic() + seconds
    while live and (left := end - time.monotonic()) > 0:
        for sentinel in wait(list(live), timeout=left):
            proc = live.pop(sentinel)
            proc.join()
            if until_failure and proc.exitcode != 0:
                return


def _ended(proc, asked):
    """How a rank ended, in words."""
    if asked:
        return "was still running and was stopped"
    code = proc.exitcode
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _report(root, endings):
    text = [f"rank {rank} {ending}" for rank, ending in enumerate(endings)]
    for kind, title in (("err", "error"), ("stack", "stack")):
        for rank in range(len(endings)):
            file = Path(root, f"{kind}{rank}")
            if file.exists() and (body := file.read_text().strip()):
                text.append(f"--- rank {rank} {title}\n{body}")
    return "\n".join(text)


def _run(procs, limit):
    """Start the ranks and wait for all; returns how each that did not succeed ended, else []."""
    for proc in procs:
        proc.start()
    live = {proc.sentinel: proc for proc in procs}
    _wait(live, limit * 0.9, until_failure=True)
    if live or any(proc.exitcode != 0 for proc in procs):
        _wait(live, 1.0, until_failure=False)  # peers may have an error of their own to tell
    stopped = list(live.values())
    for proc in stopped:
        os.kill(proc.pid, signal.SIGUSR1)
    if stopped:
        time.sleep(0.3)
    for proc in stopped:
        proc.kill()
        proc.join()
    if all(proc.exitcode == 0 for proc in procs):
        return []
    return [_ended(proc, proc in stopped) for proc in procs]


@pytest.fixture
def ranks(tmp_path):
    """Call ranks(fn, world, *args): fn(rank, world, *args) on every rank, results in rank order.

    `fn` is a module-level function. A rank that raises, dies or hangs fails the test within
    `limit` seconds with the error of every rank that has one and the stack of every rank that was
    still running. `backend` chooses the implementation of vocabtp.kernels; `device` ("cuda") gives
    each rank an accelerator of its own and the default group of that kind, gloo otherwise. With
    `hosts` that group carries host tensors too, through gloo, as a trainer's does.
    """

    def call(fn, world, *args, limit=60.0, backend=None, device=None, hosts=False):
        ctx = mp.get_context("forkserver")
        ctx.set_forkserver_preload(_preload)
        root = str(tmp_path / f"ranks{time.monotonic_ns()}")
        os.makedirs(root)
        place = (fn.__code__.co_filename, fn.__qualname__)
        how = (limit, backend, device, hosts)
        procs = [
            ctx.Process(target=_entry, daemon=True, args=(*place, r, world, root, *how, args))
            for r in range(world)
        ]
        if endings := _run(procs, limit):
            pytest.fail(_report(root, endings), pytrace=False)
        outs = [Path(root, f"out{r}") for r in range(world)]
        if missing := [r for r, out in enumerate(outs) if not out.exists()]:
            pytest.fail(f"ranks {missing} left without a result", pytrace=False)
        return [pickle.loads(out.read_bytes()) for out in outs]

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


def _has_deepspeed():
    return importlib.util.find_spec("deepspeed") is not None


def pytest_report_header():
    """Say what a missing package keeps from being tried."""
    return [] if _has_deepspeed() else ["no deepspeed here: tests marked 'deepspeed' are dropped"]


def pytest_collection_modifyitems(config, items):
    """Drop what this run did not ask for: a skipped test would hide a run of nothing."""
    if any({"vocabtp-opsd", "tests-integration"} & set(i.path.parts) for i in items):
        # seconds of every rank of every test otherwise
        _preload.extend(["torch.distributed.tensor.parallel", _A_MODEL, "vocabtp.opsd.trainer"])
    if any(i.path.match("tests-integration/*deepspeed*") for i in items):
        # ZeRO-2 imports it, and with it the compiler
        _preload.append("deepspeed.runtime.zero.muon.muon_optimizer")
    if "torch.distributed.tensor" in sys.modules:
        # the first operation on a DTensor imports the second
        _preload.extend(["torch.distributed.tensor", "torch._dynamo"])
    if "triton_interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        _preload.append("vocabtp.kernels._triton")
    if "torch._dynamo" in sys.modules:
        _preload.extend(["torch._dynamo", "torch._functorch.aot_autograd"])
    wanted = config.getoption("markexpr")
    if config.getoption("--full"):
        wanted += " full"
    drop = [m for m in ("gpu", "full") if m not in wanted]
    if not _has_deepspeed():
        drop.append("deepspeed")
    out = [i for i in items if any(i.get_closest_marker(m) for m in drop)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in out]
