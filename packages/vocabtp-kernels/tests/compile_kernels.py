"""Compiles every Triton kernel for devices that need not be there; a script, see test_compile.py.

Prints one JSON object a kernel, variant and target: registers, bytes spilled, shared memory, loads
of 16 bytes. Usage: compile_kernels.py [--full] TARGET...; a target is sm_NN or a gfx name.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vocabtp.kernels._triton import (
    finish_kernels,
    ids_kernels,
    jsd,
    jsd_kernels,
    kl_kernels,
    launch,
    online,
    tokens_kernels,
)

FLOATS = {"c", "inv_t", "clip", "beta", "rest", "scale", "factor", *(f"k{i}" for i in range(2, 8))}
LOGITS = {"x_ptr", "a_ptr", "b_ptr", "p_ptr", "q_ptr"}
WRITTEN = {"out_a_ptr", "out_b_ptr", "out_p_ptr", "out_q_ptr"}
POINTERS = {"skip_ptr": "*i8", "id_ptr": "*i64", "column_ptr": "*i32", "cell_ptr": "*i32"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def variants(hardware, full):
    """(kernel, constants, options, whether out_ptr is a gradient)."""
    t, b = {"TILE": launch.TILE}, {"BLOCK": launch.BLOCK}
    terms = {**t, "EXACT_TILE": jsd._EXACT_TILE, "HARDWARE": hardware}
    yes_no = (False, True)
    read, write, small = launch.READ, launch.WRITE, {"num_warps": 4}
    for e in yes_no:
        yield tokens_kernels.token_stats_kernel, {"ENTROPY": e, **t}, read, False
        for ids, some in ((0, 1), (1, 1), (2, 2), (2, 256)) if full else ((e, 1), (2, 256)):
            which = {"ENTROPY": e, "IDS": int(ids), "SOME": some, **b}
            yield tokens_kernels.token_grad_kernel, which, write, True
        for rows, ids in ((128, 1), (64, 2), (1, 256)) if full else ((128, 1), (1, 256)):
            # a flag in host memory, or none
            which = {"CELL": e, "ROWS": rows, "BLOCK": ids}
            yield ids_kernels.resolve_kernel, which, {"num_warps": 1}, False
            which["ENTROPY"] = e
            yield ids_kernels.finish_tokens_kernel, which, {"num_warps": 1}, False
        yield kl_kernels.pair_stats_kernel, {"WEIGHTED": e, **t}, read, False
    yield kl_kernels.kl_terms_kernel, t, launch.TERMS, False
    sides = ((True, False), (False, True), (True, True))
    for one, other in sides if full else sides[:1] + sides[2:]:
        for clip in yes_no:
            which = {"GRAD_A": one, "GRAD_B": other, "CLIP": clip, **b}
            yield kl_kernels.kl_grad_kernel, which, launch.WRITE, False
    for ends, clip in ((False, False), (True, True), (True, False), (False, True))[
        : 4 if full else 2
    ]:
        more = {"ENDS": ends, "CLIP": clip}
        yield jsd_kernels.jsd_terms_kernel, {**more, **terms}, launch.TERMS, False
        for one, other in sides if full else sides[:1]:
            which = {"GRAD_P": one, "GRAD_Q": other, "HARDWARE": hardware, **more, **b}
            options = launch.WRITE if ends or clip else launch.WRITE_QUICK
            yield jsd_kernels.jsd_grad_kernel, which, options, False
    yield ids_kernels.weights_kernel, {"BLOCK": 256}, {"num_warps": 1}, False
    yield finish_kernels.pair_scale_kernel, {"BLOCK": 128}, small, False
    for kind in ("kl", "terms"):
        yield finish_kernels.finish_kernel, {"KIND": kind, "BLOCK": 128}, small, False
    yield online.sum_segments, {"PLANES": 3, "BLOCK": 128}, small, False
    for sides_, weighted, flags in (
        (1, False, False),
        (1, True, False),
        (2, False, False),
        (2, True, True),
    ):
        which = {"SIDES": sides_, "WEIGHTED": weighted, "FLAGS": flags, "BLOCK": 128}
        yield online.merge_segments, which, small, False


def source(kernel, constants, dtype, aligned, gradient):
    types, hints = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in FLOATS:
            types[name] = "fp32"
        elif name.endswith("_ptr"):
            of_dtype = name in LOGITS or name in WRITTEN or (name == "out_ptr" and gradient)
            types[name] = "*" + (dtype if of_dtype else "fp32")
            types[name] = POINTERS.get(name, types[name])
            hints[(at,)] = [["tt.divisibility", 16]]
        else:
            types[name] = "i32"
            if aligned and (name in ("cols", "seg_cols") or "stride" in name):
                hints[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, dict(constants), hints)


def read_out(compiled, target):
    """Registers and bytes spilled of a compiled kernel."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        number = {
            k: int(re.search(rf"\.{k}:\s+(\d+)", text)[1])
            for k in ("vgpr_count", "vgpr_spill_count")
        }
        return number["vgpr_count"], number["vgpr_spill_count"]
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k.ptx")
        path.write_text(ptx)
        assembler = TOOLS / ("ptxas-blackwell" if target.arch >= 100 else "ptxas")
        gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
        command = [assembler, "-v", f"--gpu-name={gpu}", path, "-o", Path(folder, "k.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    return int(re.search(r"Used (\d+) registers", said)[1]), spilled


def main(names):
    full = "--full" in names
    for name in names:
        if name.startswith("--"):
            continue
        cuda = name.startswith("sm_")
        target = GPUTarget("cuda", int(name[3:]), 32) if cuda else GPUTarget("hip", name, 64)
        for kernel, constants, options, gradient in variants(cuda, full):
            if not cuda:
                options = {k: v for k, v in options.items() if k != "maxnreg"}
            for dtype in ("bf16", "fp16", "fp32") if full else ("bf16",):
                for aligned in (True, False) if full else (True,):
                    src = source(kernel, constants, dtype, aligned, gradient)
                    compiled = triton.compile(src, target=target, options=dict(options))
                    registers, spilled = read_out(compiled, target)
                    row = {
                        "kernel": kernel.__name__,
                        "variant": {
                            k: v for k, v in constants.items() if not k.endswith(("BLOCK", "TILE"))
                        },
                        "target": name,
                        "dtype": dtype,
                        "aligned": aligned,
                        "registers": registers,
                        "spilled": spilled,
                        "shared": compiled.metadata.shared,
                        "wide_loads": compiled.asm["ptx"].count("ld.global.v4") if cuda else None,
                    }
                    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
