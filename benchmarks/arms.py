"""Who is measured: this package's two backends, PyTorch, and other libraries where installed.

An arm takes an op's arguments, logits as they are, and returns what the op returns. A library is an
arm of an op only where it does the same work: LigerJSD and LigerKLDIVLoss want log-probabilities,
so their log-softmax is part of it, and they return the mean over rows; neither has a gradient for
the teacher. Liger's cross entropy overwrites its logits and TRL's fused losses begin at hidden
states: neither is compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import vocabtp.kernels as vk
from cases import CASES, MODES, Op, Values


@dataclass(frozen=True)
class Arm:
    """One implementation of some of the ops."""

    ops: Mapping[str, Op]
    modes: tuple[str, ...] = MODES
    mean: bool = False  # it returns the mean over rows
    captured: bool = True  # worth trying to record as a CUDA graph


def _ours(backend: str, op: Op) -> Op:
    def run(*inputs: Tensor) -> Values:
        with vk.backend(backend):  # type: ignore[arg-type]
            return op(*inputs)

    return run


def _triton(device: torch.device) -> Arm:
    if device.type == "cpu":
        raise ImportError("the Triton kernels run on accelerators")
    with vk.backend("triton"):
        vk.which_backend(torch.empty(1, 1, device=device))
    return Arm({name: _ours("triton", case.ours) for name, case in CASES.items()})


def _eager(device: torch.device) -> Arm:
    # its thousands of launches would make a large graph, and are long enough to hide the host
    ops = {name: _ours("eager", case.ours) for name, case in CASES.items()}
    return Arm(ops, captured=False)


def _compile(device: torch.device) -> Arm:
    # fullgraph: an error rather than a silent return to eager
    compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    return Arm({name: compiled(case.dense) for name, case in CASES.items()})


def _dense(device: torch.device) -> Arm:
    return Arm({name: case.dense for name, case in CASES.items()})


def _deepspeed(device: torch.device) -> Arm:
    module = importlib.import_module("deepspeed.sequence.vocab_parallel_ops")

    def logprobs(logits: Tensor, index: Tensor) -> Tensor:
        # with bounds it asks no group; a bad id it looks for in every call, and waits for it
        width = logits.shape[-1]
        return module.vocab_parallel_logprobs(logits, index, None, 0, width, width)

    ops: dict[str, Op] = {
        "reverse_kl": partial(module.vocab_parallel_kl_div, reverse=True),
        "forward_kl": module.vocab_parallel_kl_div,
        "entropy": module.vocab_parallel_entropy,
        "logprobs": logprobs,
        "logprobs_k256": logprobs,
        "logprobs_and_entropy": lambda x, ids: (logprobs(x, ids), module.vocab_parallel_entropy(x)),
    }
    if hasattr(module, "vocab_parallel_jsd"):
        ops["jsd"] = module.vocab_parallel_jsd
    return Arm(ops, captured=False)


def _liger(device: torch.device) -> Arm:
    module = importlib.import_module("liger_kernel.transformers")
    kl = module.LigerKLDIVLoss(reduction="batchmean", log_target=True)

    def on_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Op:
        def run(student: Tensor, teacher: Tensor) -> Tensor:
            log_p, log_q = (torch.log_softmax(x, -1, torch.float32) for x in (student, teacher))
            return loss(log_p, log_q)

        return run

    ops = {
        "reverse_kl": on_logits(module.LigerJSD(beta=1.0)),
        "forward_kl": on_logits(kl),
        "jsd": on_logits(module.LigerJSD(beta=0.5)),
    }
    # its backward compares the upstream gradient with 1 on the host
    return Arm(ops, modes=MODES[:2], mean=True, captured=False)


def _trl(device: torch.device) -> Arm:
    module = importlib.import_module("trl.kernels")
    return Arm({"logprobs_and_entropy": module.selective_log_softmax_and_entropy})


_FINDERS: dict[str, tuple[str | None, Callable[[torch.device], Arm]]] = {
    "triton": (None, _triton),
    "eager": (None, _eager),
    "compile": (None, _compile),
    "dense": (None, _dense),
    "deepspeed": ("deepspeed", _deepspeed),
    "liger": ("liger-kernel", _liger),
    "trl": ("trl", _trl),
}
NAMES = tuple(_FINDERS)


def find(names: tuple[str, ...], device: torch.device) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that can run here, and why the others cannot."""
    found: dict[str, Arm] = {}
    absent: dict[str, str] = {}
    for name in names:
        distribution, finder = _FINDERS[name]
        try:
            if distribution is not None:
                metadata.version(distribution)
            found[name] = finder(device)
        except metadata.PackageNotFoundError:
            absent[name] = "not installed"
        except Exception as error:  # whatever a foreign package does at import
            absent[name] = f"{type(error).__name__}: {first_line(error)}"
    return found, absent


def versions(names: list[str]) -> dict[str, str]:
    """Versions of the libraries among these arms, and of what all of them run on."""
    wanted = ["triton", "vocabtp-kernels", *(_FINDERS[name][0] for name in names)]
    found: dict[str, Any] = {"torch": torch.__version__}
    for distribution in filter(None, wanted):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            # the sources on PYTHONPATH, or none
            found[distribution] = vk.__version__ if distribution.startswith("vocabtp") else None
    return found


def first_line(error: BaseException) -> str:
    """An error in one line of a table."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200]
