"""Where kernels run and how they are started: beside `_flags`, the only file that names a device.

Every kernel takes rows at up to two strides. A forward cuts a row into segments whose number
depends on its width alone, so that few rows fill a chip and a row's bits never depend on how many
rows there are.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from vocabtp.kernels._rows import Rows

# exp(x) is exp2(LOG2E x) on the device
LOG2E = 1.4426950408889634
# columns that a program of the forward reads a step: four loads of a tile, which is longer than
# any phase
TILE = 1024
STEP = 4 * TILE
# columns of a block of an element-wise kernel, and blocks that one of its programs does: to find
# its row costs a program as much as a block
BLOCK = 1024
BLOCKS = 4
# rows that a program of a `[N]` kernel takes, however few there are: to be compiled for another
# number may change which products and sums become one instruction, and so a row's bits
ROW_BLOCK = 128
# What the kernels were fastest with on an H200; none of it changes a bit. Stages are the groups of
# tiles that are on their way or at work. A program costs about as much to start and to end as two
# steps.
STAGES = 3
TERMS_STAGES = 3
READ = {"num_warps": 4}
TERMS = {"num_warps": 4}
WRITE = {"num_warps": 4}
# bytes of a cache line
_LINE = 128
# NVIDIA's chips by `_major`, in what `capped` takes
ANY, HOPPER, BLACKWELL = 0, 9, 10
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


def programs_of_row(cols: int, shift: bool) -> int:
    """Programs of an element-wise kernel that a row takes."""
    # a phase is less than 128 bytes of two bytes each
    return -(-(cols + 63 if shift else cols) // (BLOCK * BLOCKS))


class _Phase(NamedTuple):
    """What decides where the rows of a tensor lie in lines of 128 bytes, in elements."""

    every: int  # elements of a line
    inner: int  # rows of the inner dimension, 0 where one stride walks all rows
    start: int
    stride_outer: int
    stride_inner: int

    @property
    def aligned(self) -> bool:
        """Whether each row begins at a multiple of 16 bytes."""
        each = self.every // 8
        return not (self.start % each or self.stride_outer % each or self.stride_inner % each)


def _phase(rows: Rows) -> _Phase:
    size = rows.blocks.element_size()
    every = _LINE // size
    inner, stride_outer, stride_inner = strides(rows)
    start = rows.blocks.data_ptr() // size % every
    # an outer stride that is a multiple of a line is not the inner one's continuation: after
    # logits[:, :-1] each sequence begins anew, while rows of the gradient just go on
    if rows.blocks.shape[0] == 1 or (stride_outer - inner * stride_inner) % every == 0:
        inner = stride_outer = 0
    return _Phase(every, inner, start, stride_outer % every, stride_inner % every)


def alignment(*sides: Rows) -> dict[str, bool]:
    """How a forward's kernel reaches whole 16 bytes, as its constants.

    `SHIFT` moves its lanes by the phase of a side, the second with `LEAD_B`; `WIDE_*` says which
    sides have that phase.
    """
    phases = [_phase(side) for side in sides]
    # loads of two bytes are too narrow, those of four are not
    lead_b = len(phases) == 2 and _worse(phases[1], phases[0])
    lead = phases[lead_b]
    found = {"SHIFT": not lead.aligned}
    if len(phases) == 2:
        found["LEAD_B"] = lead_b
    for letter, phase in zip("AB", phases, strict=False):
        found[f"WIDE_{letter}"] = _together(phase, lead) if found["SHIFT"] else phase.aligned
    return found


def grad_alignment(sides: Sequence[Rows], outs: Sequence[Tensor | None]) -> dict[str, bool]:
    """How a kernel of gradients `[N, L]` reaches whole 16 or 8 bytes, as its constants.

    `SHIFT` moves its lanes by the phase of a gradient, of two the second with `LEAD_B`; `WIDE_*`
    says which sides, and `WIDE_OUT_*` which of two gradients, have that phase, and `WORDS` that a
    side of two bytes has not.
    """
    phases = [_phase(side) for side in sides]
    written = [None if out is None else _phase(Rows(out.unsqueeze(0))) for out in outs]
    given = [phase for phase in written if phase is not None]
    lead_b = len(given) == 2 and _worse(given[1], given[0])
    lead = given[lead_b]
    short = [phase for phase in phases if phase.every == _LINE // 2]
    # a mask is free only where it is the same for all of 16 bytes
    shift = sides[0].num_cols % 16 != 0 or not all(phase.aligned for phase in (lead, *short))

    def wide(phase: _Phase) -> bool:
        return _together(phase, lead) if shift else phase.aligned

    found = {"SHIFT": shift, "WORDS": not all(wide(phase) for phase in short)}
    found |= {f"WIDE_{letter}": wide(phase) for letter, phase in zip("AB", phases, strict=False)}
    if len(written) == 2:
        found["LEAD_B"] = lead_b
        for letter, out in zip("AB", written, strict=True):
            found[f"WIDE_OUT_{letter}"] = out is not None and wide(out)
    return found


def _worse(one: _Phase, other: _Phase) -> bool:
    """Whether the first side gains more from aligned accesses than the second."""
    return (one.every, not one.aligned) > (other.every, not other.aligned)


def _together(one: _Phase, lead: _Phase) -> bool:
    """Whether the first side's rows begin where the leader's do, in what 16 bytes of it are."""
    each = one.every // 8
    places = list(zip(one[2:], lead[2:], strict=True))
    # where all rows begin with 16 bytes, how they follow each other says nothing
    return not any(a % each or b % each for a, b in places) or (
        one.inner == lead.inner and not any((a - b) % each for a, b in places)
    )


def _nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not INTERPRETED


def hardware_log(device: torch.device) -> bool:
    """Whether the approximate base-2 logarithm of NVIDIA's chips may be used."""
    return _nvidia(device)


def ordering_barrier(device: torch.device) -> bool:
    """Whether a barrier orders a program's stores to memory, as `bar.sync` does."""
    return _nvidia(device) or INTERPRETED


def _major(device: torch.device) -> int:
    """The first number of a chip's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def capped(
    options: dict[str, int], device: torch.device, registers: Mapping[int, int]
) -> dict[str, int]:
    """`options` with the most registers a thread may take, on `ANY` NVIDIA chip or on some.

    For what ptxas, left alone, spills a register of, or where fewer registers a thread let more
    programs run at once.
    """
    if not registers or not _nvidia(device):
        return options
    most = registers.get(_major(device), registers.get(ANY))
    return options if most is None else {**options, "maxnreg": most}


def run(kernel: Any, programs: int, device: torch.device, *args: object, **options: Any) -> None:
    """Start `programs` programs of a kernel on the device that holds its tensors."""
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
    # the passes after Triton's own front end fail as RuntimeError, as does a host without the C
    # compiler that a launcher is built with; one that cannot build it ends with an error of its own
    kinds = (TritonError, NotImplementedError, subprocess.CalledProcessError)
    return isinstance(error, kinds) or any(
        words in str(error) for words in ("PassManager", "Failed to find C compiler")
    )
