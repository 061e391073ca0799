"""Sharded JSD on several ranks, forward plus backward, the teacher frozen (`ops.py --tp R`).

The routes: all logits gathered on every rank and the dense formula; the shards with this package's
eager and Triton paths; and, as what a divergence without a second read costs, Triton's reverse KL.
A trial is one call of each route, from a barrier to the end of the device's work; it counts with
its slowest rank. Losses and local gradients are judged before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import vocabtp.kernels as vk
from arms import versions
from cases import dense_jsd, make_inputs
from results import Result, Results, facts
from timing import LEAST, SLOW_MS, summary
from verdict import CHECKED_ROWS, complaint, relative
from vocabtp.dist import VocabShard, vocab_parallel_jsd, vocab_parallel_kl_div
from vocabtp.kernels import reference

BETA = 0.3
SHAPE, SMALL = (1024, 151936), (32, 4096)
TRIALS, BURST = 30, 10
_TIMEOUT = datetime.timedelta(seconds=180)

_COLUMNS = ("route", "median ms", "p20", "p80", "back to back ms", "peak GiB a rank")

Call = Callable[[], tuple[Tensor, Tensor]]  # losses [N], this rank's gradient [N, L]


class Route(NamedTuple):
    """One way to the loss, and which loss it is."""

    op: str
    arm: str
    call: Call


def main(args: argparse.Namespace) -> None:
    """Start the ranks, or say what they would need; under torchrun be one of them."""
    rows, cols = SMALL if args.device == "cpu" else SHAPE
    rows, cols = (*args.rows, rows)[0], (*args.cols, cols)[0]
    if cols % args.tp:
        raise SystemExit(f"--cols: must be a multiple of --tp {args.tp}, got {cols}")
    # the dtype of the published table, unless --only names another
    dtype = args.dtypes[0]
    args = argparse.Namespace(**{**vars(args), "rows": rows, "cols": cols, "dtype": dtype})
    if "RANK" in os.environ:
        _worker(int(os.environ["RANK"]), args, None)
        return
    there = args.tp if args.device == "cpu" else torch.accelerator.device_count()
    if there < args.tp:
        print(
            f"--tp {args.tp} needs {args.tp} devices in one machine and finds {there}. There, run\n"
            f"    python benchmarks/ops.py --tp {args.tp} --out {args.out}\n"
            f"or the same under torchrun --nproc-per-node {args.tp}; "
            f"--device cpu tries it on gloo at a small size"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (args, f"{folder}/store"), nprocs=args.tp)


def _worker(rank: int, args: argparse.Namespace, store: str | None) -> None:
    device = torch.device("cpu")
    backend = {"cpu": "gloo", "xpu": "xccl"}.get(args.device, "nccl")
    if args.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", rank)))
        torch.accelerator.set_device_index(device.index)
    place: dict[str, Any] = {} if args.device == "cpu" else {"device_id": device}
    if store is not None:
        place |= {"init_method": f"file://{store}", "rank": rank, "world_size": args.tp}
    dist.init_process_group(backend, timeout=_TIMEOUT, **place)
    try:
        found = measure(args, device)
        if rank == 0:
            _keep(found, args, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _routes(student: Tensor, teacher: Tensor, shard: VocabShard) -> list[Route]:
    ones = torch.ones(student.shape[0], device=student.device)

    def gathered(local: Tensor) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(shard.world_size)]
        dist.all_gather(parts, local.detach())
        return torch.cat(parts, dim=-1)

    def dense() -> tuple[Tensor, Tensor]:
        p, q = gathered(student).requires_grad_(), gathered(teacher)
        losses = dense_jsd(p, q, BETA)
        (grad,) = torch.autograd.grad(losses, p, ones)
        return losses, grad[:, shard.start : shard.end]

    def sharded(backend: str, loss: Callable[[], Tensor]) -> Call:
        def call() -> tuple[Tensor, Tensor]:
            with vk.backend(backend):  # type: ignore[arg-type]
                losses = loss()
            (grad,) = torch.autograd.grad(losses, student, ones)
            return losses, grad

        return call

    def jsd() -> Tensor:
        return vocab_parallel_jsd(student, teacher, BETA, shard=shard)

    def reverse_kl() -> Tensor:
        return vocab_parallel_kl_div(student, teacher, True, shard=shard)

    found = [
        Route("jsd", "gather + dense", dense),
        Route("jsd", "eager shards", sharded("eager", jsd)),
    ]
    if student.device.type != "cpu":
        found.append(Route("jsd", "Triton shards", sharded("triton", jsd)))
        found.append(Route("reverse_kl", "Triton shards", sharded("triton", reverse_kl)))
    return found


class _Truth(NamedTuple):
    rows: Tensor
    losses: Tensor
    gradients: Tensor  # this rank's columns


def _truths(student: Tensor, teacher: Tensor, shard: VocabShard) -> dict[str, _Truth]:
    """fp64 losses and local gradients of some rows of the whole logits."""
    total = student.shape[0]
    rows = torch.linspace(0, total - 1, min(total, CHECKED_ROWS), device=student.device)
    rows = rows.round().long()
    found = {}
    calls: list[tuple[str, Callable[..., Tensor], dict[str, object]]] = [
        ("jsd", reference.jsd, {"beta": BETA}),
        ("reverse_kl", reference.kl_div, {"reverse": True}),
    ]
    for op, function, options in calls:
        pair = [x[rows].double() for x in (student, teacher)]
        losses = function(*pair, **options)
        grad = reference.gradients(function, pair, [torch.ones_like(losses)], **options)[0]
        found[op] = _Truth(rows, losses, grad[:, shard.start : shard.end].clone())
    return found


def measure(args: argparse.Namespace, device: torch.device) -> list[Result]:
    """Every route on this process group: judged, then timed; the same results on all ranks."""
    group = dist.group.WORLD
    shard = VocabShard.even(args.cols, group).check()
    dtype = getattr(torch, args.dtype)
    whole = make_inputs(args.rows, args.cols, dtype, "contiguous", device, 0)
    truths = _truths(whole.student, whole.teacher, shard)
    student, teacher = (
        x[:, shard.start : shard.end].clone() for x in (whole.student, whole.teacher)
    )
    del whole
    base = {"kind": "tp", "mode": "train", "rows": args.rows, "cols": args.cols}
    base |= {"dtype": args.dtype, "layout": "contiguous", "world": args.tp, "beta": BETA}
    found, right = [], []
    routes = _routes(student.requires_grad_(), teacher, shard)
    for route in routes:
        verdict = _judge(route, truths[route.op], dtype)
        found.append({**base, "op": route.op, "arm": route.arm, **verdict})
        right.append(verdict["status"] == "ok")
    del truths
    timed = [route for route, good in zip(routes, right, strict=True) if good]
    peaks = [_peak_gib(route, device) for route in timed]
    trials = 3 if args.quick else TRIALS
    alone = _times(timed, trials, [1] * len(timed), device)
    # a burst hides the host's part, of which a slow route has little
    calls = [BURST if statistics.median(once) < SLOW_MS / BURST else 1 for once in alone]
    bursts = _times(timed, trials // 3, calls, device)
    numbers = iter(zip(peaks, alone, bursts, strict=True))
    for result, good in zip(found, right, strict=True):
        if good:
            peak, once, burst = next(numbers)
            result |= {**summary(once), "samples": len(once), "how": "clock", "peak_gib": peak}
            result["back_to_back_ms"] = summary(burst)["median_ms"]
    return found


def _judge(route: Route, truth: _Truth, dtype: torch.dtype) -> Result:
    """Every rank's losses and local gradients against the truth; all ranks hear the worst."""
    losses, grad = route.call()
    near = [relative(losses.detach()[truth.rows], truth.losses)]
    # on the scale of this shard's largest gradient
    near.append(relative(grad[truth.rows], truth.gradients))
    both = torch.tensor(near, dtype=torch.float64).nan_to_num(nan=float("inf"))
    both = _worst_rank(both, grad.device)
    value, gradient = both.tolist()
    wrong = complaint(value, gradient, dtype)
    found: Result = {"status": "wrong" if wrong else "ok", "note": wrong}
    return found | {
        "value_error": float(f"{value:.2g}"),
        "gradient_error": float(f"{gradient:.2g}"),
    }


def _worst_rank(x: Tensor, device: torch.device) -> Tensor:
    there = x.to(device)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return there.cpu()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak_gib(route: Route, device: torch.device) -> float | None:
    """The most that a rank holds during a call, inputs and results with it."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    kept = route.call()
    _wait(device)
    peak = torch.tensor([torch.cuda.max_memory_allocated(device) / 2**30])
    del kept
    return round(float(_worst_rank(peak, device)), 3)


def _times(
    routes: list[Route], trials: int, calls: list[int], device: torch.device
) -> list[list[float]]:
    """ms a call of each route in each trial, of the rank that was slowest in it."""
    found: list[list[float]] = [[] for _ in routes]
    # the first trial warms up
    for trial in range(trials + 1):
        for at, route in enumerate(routes):
            # all ranks have the same times, and leave a slow route together
            if len(found[at]) >= LEAST and found[at][0] * calls[at] > SLOW_MS:
                continue
            dist.barrier()
            _wait(device)
            start = time.perf_counter()
            for _ in range(calls[at]):
                route.call()
            _wait(device)
            taken = torch.tensor([1e3 * (time.perf_counter() - start) / calls[at]])
            if trial:
                found[at].append(float(_worst_rank(taken, device)))
    return found


def _keep(found: list[Result], args: argparse.Namespace, device: torch.device) -> None:
    run = {**facts(device, args.commit), "versions": versions([]), "world": args.tp}
    run["backend"] = dist.get_backend()
    results = Results(args.out, run)
    print(f"{run['device']} x {args.tp}, {run['backend']}, {run['versions']}")
    print(f"{args.rows} x {args.cols} {args.dtype}, beta {BETA}, frozen teacher")
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for result in found:
        results.add(result)
        cells = [f"{result['arm']}, {result['op']}"]
        if result["status"] == "ok":
            times = ("median_ms", "p20_ms", "p80_ms", "back_to_back_ms")
            cells += [f"{result[name]:.4g}" for name in times] + [str(result["peak_gib"] or "")]
        else:
            cells += [result["status"], "", "", "", result["note"]]
        print(f"| {' | '.join(cells)} |")
    results.save()
    print(f"results in {args.out}")
