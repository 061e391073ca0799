"""Where kernels run and how they are started: the only file that names a device.

Every kernel takes rows at up to two strides. A forward cuts a row into segments whose number
depends on its width alone, so that few rows fill a chip and a row's bits never depend on how many
rows there are.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from vocabtp.kernels._rows import Rows

# columns that a program of the forward reads a step: four loads of a tile
TILE = 1024
STEP = 4 * TILE
# columns of a block of an element-wise kernel
BLOCK = 2048
# What the kernels were fastest with on an H200; none of it changes a bit. A program costs about as
# much to start and to end as two steps; more registers than these leave room for fewer programs.
READ = {"num_warps": 4}
TERMS = {"num_warps": 4}
WRITE = {"num_warps": 4}
WRITE_QUICK = {"num_warps": 4, "maxnreg": 80}
_MOST_SEGMENTS = 8
_LEAST_STEPS = 8

_DEVICES = ("cuda", "xpu")  # "cuda" is ROCm's name too
INTERPRETED = triton.knobs.runtime.interpret
# the interpreter keeps the program's number in a global
_one_at_a_time = threading.Lock()


class CannotCompile(RuntimeError):
    """A kernel did not compile for a device."""


def obstacle(device: torch.device) -> str | None:
    """Why kernels cannot run on this device."""
    if device.type == "cpu" and not INTERPRETED:
        return (
            "the tensors are on the CPU and Triton's interpreter is off: it wants "
            "TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    if device.type not in ("cpu", *_DEVICES):
        return f"there are no Triton kernels for {device.type} tensors"
    return None


def name(device: torch.device) -> str:
    """The device as its vendor calls it."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


class Segments(NamedTuple):
    """How a row of some width is cut."""

    number: int
    cols: int  # of each but the last


def segments(cols: int) -> Segments:
    """Segments of whole steps, at most eight, of about eight steps at least."""
    steps = max(1, -(-cols // STEP))
    each = -(-steps // min(_MOST_SEGMENTS, max(1, steps // _LEAST_STEPS)))
    return Segments(-(-steps // each), each * STEP)


def strides(rows: Rows) -> tuple[int, int, int]:
    """What a kernel needs to find a row: rows of the inner dimension, outer and inner stride."""
    return rows.blocks.shape[1], rows.blocks.stride(0), rows.blocks.stride(1)


def _nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not INTERPRETED


def hardware_log(device: torch.device) -> bool:
    """Whether the approximate base-2 logarithm of NVIDIA's chips may be used."""
    return _nvidia(device)


def run(kernel: Any, programs: int, device: torch.device, *args: object, **options: Any) -> None:
    """Start `programs` programs of a kernel on the device that holds its tensors."""
    if not _nvidia(device):
        options.pop("maxnreg", None)
    on_device: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device.type != "cpu":
        on_device = torch.get_device_module(device).device(device)
    with on_device, _one_at_a_time if INTERPRETED else contextlib.nullcontext():
        try:
            kernel[(programs,)](*args, **options)
        except Exception as error:
            if device.type != "cpu" and _of_compiler(error):
                what = f"{kernel.__name__} does not compile for {name(device)}: {error}"
                raise CannotCompile(what) from error
            raise


def _of_compiler(error: Exception) -> bool:
    # the passes after Triton's own front end fail as RuntimeError
    return isinstance(error, TritonError | NotImplementedError) or "PassManager" in str(error)


def row_block(rows: int) -> int:
    """Rows that a program of a `[N]` kernel takes."""
    return 128 if rows >= 128 else triton.next_power_of_2(max(rows, 1))


def partials(out: Tensor, cut: Segments) -> Tensor:
    """Where segments put their statistics `[planes, segments, N]`; `out` itself for one segment."""
    if cut.number == 1:
        return out
    return out.new_empty(out.shape[0], cut.number, out.shape[1])
