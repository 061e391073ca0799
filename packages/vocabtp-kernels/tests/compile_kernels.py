"""Compiles the Triton kernels for devices that need not be there; a script, see test_compile.py.

The ops run on CPU tensors of every dtype and layout, each with every option and for each choice of
gradients. Their launches start nothing: they are taken down, and then specialized and compiled by
Triton as on the device, with the options they were launched with. So what is compiled is what the
package launches, and nothing here names a kernel or an argument.

A variant is a kernel with its constants in a call on the usual dtype and layout. With --full each
is compiled for every other dtype and layout too, whatever that makes of its constants. Without it a
kernel's first variant is compiled for what is usual, the second for another dtype and layout - the
first once more, of a kernel that has no second - and the rest for each dtype in turn; the next
target takes the next of them. Prints one JSON object each.

Two processes compile, with line numbers as the package does: without them some kernels take other
registers.

Usage: compile_kernels.py [--full] TARGET...; a target is sm_NN or a gfx name.
"""

import contextlib
import functools
import gc
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import vocabtp.kernels as vk
from vocabtp.kernels import _ids, _triton
from vocabtp.kernels._triton import launch
from vocabtp.kernels.testing import OPS

# rows enough for every block of rows, columns for several segments of one
ROWS, COLS = 130, 65_536
# two and four times as many threads as fewer ids take; more than are seen at once
MANY_IDS = (300, 600, 1_100)
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"]
PROCESSES = 2
# loads of 16 bytes, into registers and into shared memory, and stores; words are of 8
WIDE_LOAD = r"ld\.global\.v4|cp\.async\.cg"
WIDE_STORE = r"st\.global\.v4"
WORD_STORE = r"st\.global\.v[24]"
LAYOUTS = {  # columns, row stride, first element
    "aligned": (COLS, 64, 0),
    "cut": (COLS - 1, 64, 0),
    "odd": (COLS + 1, 63, 0),
    "shifted": (COLS, 64, 1),
}
DTYPES = {  # of the student, or an only side, and the teacher
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "mixed": (torch.bfloat16, torch.float32),
}
WAYS = [(dtype, layout) for layout in LAYOUTS for dtype in DTYPES]
USUAL_LAYOUT, OTHERS = WAYS[:4], WAYS[4:]
# what testing.OPS leaves out: a clip at a beta close to an end
CALLS = {**OPS, "jsd_end_clip": ("jsd", {"beta": 0.02, "pointwise_clip": 0.01})}


class Twice:
    """Two ranks that hold the same."""

    def gather(self, x):
        return torch.stack([x, x])

    def sum(self, x):
        return x


class Device:
    """What Triton asks of a driver until it has a kernel to load."""

    def __init__(self, name):
        cuda = name.startswith("sm_")
        self.target = GPUTarget("cuda", int(name[3:]), 32) if cuda else GPUTarget("hip", name, 64)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


def calls(dtype, layout):
    """Every op forward and backward, as functions; nobody reads rows, so they overlap."""
    cols, stride, first = LAYOUTS[layout]
    buffers = [torch.zeros(cols + ROWS * 64 + 1, dtype=x) for x in DTYPES[dtype]]
    sides = [x.as_strided((ROWS, cols), (stride, 1), first) for x in buffers]
    for op, many in itertools.product(("logprobs", "logprobs_and_entropy"), MANY_IDS):
        ids = {"index": torch.zeros(ROWS, many, dtype=torch.int64)}
        yield functools.partial(both_ways, op, sides[:1], (True,), ids)
    for function, options in CALLS.values():
        two = function in ("kl_div", "jsd")
        exchanges = [{}, {"exchange": Twice()}]
        if function.startswith("logprobs"):
            ids = [torch.zeros(ROWS, k, dtype=torch.int64) for k in (1, 200)]
            # reported at once, and as ids on an accelerator are
            some = [{"index": k, "validate_ids": v} for k in ids for v in (True, False)]
            exchanges[1] |= {"vocab_size": 2 * cols}
        else:
            some = [{}]
        for more in [a | b for a in some for b in exchanges]:
            for needed in ((True, False), (False, True), (True, True)) if two else ((True,),):
                yield functools.partial(both_ways, function, sides, needed, {**options, **more})


def both_ways(function, sides, needed, options):
    leaves = [x.detach().requires_grad_(n) for x, n in zip(sides, needed, strict=False)]
    values = getattr(vk, function)(*leaves, **options)
    values = values if isinstance(values, tuple) else (values,)
    outs = [x for x in leaves if x.requires_grad]
    torch.autograd.grad(values, outs, [torch.ones_like(v) for v in values])


@functools.cache
def launches(major):
    """All that the ops launch: variant -> {(dtype, layout): (kernel, args, options)}.

    `major` is that of a chip's compute capability, 0 for ROCm.
    """
    found, usual, now = {}, {}, SimpleNamespace()

    def take_down(kernel, *args, grid, warmup, **options):
        constants = {k: v for k, v in options.items() if k in kernel.arg_names}
        # a call's launches of a kernel, counted
        place = (now.call, kernel.__name__, now.launched.count(kernel))
        now.launched.append(kernel)
        if now.way == USUAL_LAYOUT[0]:
            usual[place] = constants
        variant = (kernel.__name__, json.dumps(usual.get(place, constants)))
        found.setdefault(variant, {}).setdefault(now.way, (kernel, args, options))

    with contextlib.ExitStack() as patches:
        _patch(patches, JITFunction, "run", take_down)
        _patch(patches, _triton, "obstacle", lambda device: None)
        _patch(patches, launch, "_nvidia", lambda device: major > 0)
        _patch(patches, launch, "_major", lambda device: major)
        cell = torch.zeros(1, dtype=torch.int32)
        _patch(patches, _ids.Watch, "cell", property(lambda watch: cell))
        # what a kernel would have written of ids is read by the host: zeros, nothing wrong
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            _patch(patches, owner, name, zeros(getattr(owner, name)))
        with vk.backend("triton"):
            for way in WAYS:
                for number, call in enumerate(calls(*way)):
                    now.way, now.call, now.launched = way, number, []
                    call()
    return found


def zeros(empty):
    """Like `empty`, but filled, unless it takes time."""

    def filled(*args, **options):
        made = empty(*args, **options)
        return made.zero_() if made.numel() < ROWS * 1024 else made

    return filled


def _patch(stack, owner, name, value):
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def chosen(found, turn):
    """The launches to compile without --full: (variant, (dtype, layout))."""
    kernels = {}
    for variant in found:
        kernels.setdefault(variant[0], []).append(variant)
    for variants in kernels.values():
        plans = [(variants[0], USUAL_LAYOUT, 0)]
        # steps of five: dtype and layout both change from one target to the next
        plans.append((variants[min(1, len(variants) - 1)], OTHERS, 5 * turn))
        plans += [(v, USUAL_LAYOUT, turn + n) for n, v in enumerate(variants[2:])]
        for variant, ways, start in plans:
            there = found[variant]
            turns = [ways[(start + n) % len(ways)] for n in range(len(ways))]
            way = next((w for w in turns if w in there), next(iter(there)))
            yield variant, way


def compile_one(kernel, args, options):
    """A compiled kernel, and what ptxas said of it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compiled = kernel.run(*args, grid=(1,), warmup=True, **options)
    return compiled, said.getvalue()


def read_out(compiled, said):
    """Registers, spills and bytes of stack of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        number = {k: int(re.search(rf"\.{k}:\s+(\d+)", text)[1]) for k in names}
        return number["vgpr_count"], sum(number[k] for k in names[1:])
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), sum(map(int, spilled.groups()))


def major_of(target):
    return int(target[3:]) // 10 if target.startswith("sm_") else 0


def tasks(target, full):
    """What to compile for a target: (target, variant, (dtype, layout)), of its `launches`."""
    found = launches(major_of(target))
    turn = TARGETS.index(target) if target in TARGETS else 0
    every = ((variant, way) for variant, ways in found.items() for way in ways)
    return [(target, variant, way) for variant, way in (every if full else chosen(found, turn))]


def row_of(task):
    """Compile for a target: the hash and what came out, None where another's result was found."""
    target, variant, way = task
    kernel, args, options = launches(major_of(target))[variant][way]
    driver.set_active(Device(target))
    kernel.device_caches.clear()
    compiled, said = compile_one(kernel, args, options)
    if "cubin" in compiled.asm and not said:
        return compiled.hash, None
    registers, spilled = read_out(compiled, said)
    return compiled.hash, {
        "kernel": variant[0],
        "variant": variant[1],
        "constants": {k: v for k, v in options.items() if k in kernel.arg_names},
        "options": {k: v for k, v in options.items() if k not in kernel.arg_names},
        "target": target,
        "dtype": way[0],
        "layout": way[1],
        "registers": registers,
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "wide_loads": len(re.findall(WIDE_LOAD, compiled.asm.get("ptx", ""))),
        "wide_stores": len(re.findall(WIDE_STORE, compiled.asm.get("ptx", ""))),
        "word_stores": len(re.findall(WORD_STORE, compiled.asm.get("ptx", ""))),
    }


def main(*words):
    triton.knobs.nvidia.dump_ptxas_log = True
    seen, before = set(), None
    for target in (word for word in words if not word.startswith("--")):
        if before != major_of(target):
            # their tensors, of which little is touched, are gigabytes
            launches.cache_clear()
            gc.collect()
        before = major_of(target)
        todo = tasks(target, "--full" in words)
        # the launches, which the processes below share, are all there is to keep
        gc.disable()
        with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
            for key, row in pool.imap(row_of, todo):
                # the same for another dtype or layout
                if row is not None and key not in seen:
                    seen.add(key)
                    sys.stdout.write(json.dumps(row) + "\n")
        gc.enable()


if __name__ == "__main__":
    # a cache would hide what no longer compiles
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main(*sys.argv[1:])
