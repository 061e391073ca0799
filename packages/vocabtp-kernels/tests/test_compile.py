"""The kernels compile for devices that are not here, without spilling a register.

What they take of a device is in the terminal summary, see conftest.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
READERS = {"token_stats_kernel", "pair_stats_kernel", "jsd_terms_kernel"}
WRITERS = {"token_grad_kernel", "kl_grad_kernel", "jsd_grad_kernel"}
# which gradients a pair's kernel writes
SIDES = ("GRAD_A", "GRAD_B", "GRAD_P", "GRAD_Q")


def compile_for(*words, seconds):
    # an interpreting process cannot compile
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(rows, targets):
    for row in rows:
        sys.stdout.write(
            f"{row['target']:7} {row['dtype']} {row['layout']:7} "
            f"{row['registers']:3} registers {row['spilled']:3} B spilled "
            f"{row['shared']:5} B shared  "
            f"{row['kernel']} {row['constants']} {row['options']}\n"
        )
    assert {row["target"] for row in rows} == set(targets)
    assert not [row for row in rows if row["spilled"]]
    # 16 bytes a load and a store, or the bandwidth goes unused; the sums of JSD's exact way are
    # bound by arithmetic
    chips = {target for target in targets if target.startswith("sm_")}
    found = [row for row in rows if row["target"] in chips]
    read = [
        row
        for row in found
        if row["kernel"] in READERS
        and not (row["constants"].get("ENDS") or row["constants"].get("CLIP"))
    ]
    written = [row for row in found if row["kernel"] in WRITERS]
    for some, kernels in ((read, READERS), (written, WRITERS)):
        aligned = [row for row in some if row["layout"] == "aligned"]
        there = {(row["target"], row["kernel"]) for row in aligned}
        assert there == {(chip, kernel) for chip in chips for kernel in kernels}
        assert all(row["wide_loads"] for row in aligned)
    for row in written:
        # token_grad_kernel has none of the names, and one gradient
        gradients = sum(row["constants"].get(side, False) for side in SIDES) or 1
        stores = row["constants"]["BLOCKS"] * gradients
        assert row["word_stores"] >= stores
        assert row["wide_stores"] >= stores or row["constants"]["WORDS"]


def most(rows):
    """Of each target and kernel: variants, and the most registers and shared memory of them."""
    table = {}
    for row in rows:
        variants, registers, shared = table.setdefault(row["target"], {}).get(
            row["kernel"], (set(), 0, 0)
        )
        variants.add(row["variant"])
        table[row["target"]][row["kernel"]] = (
            variants,
            max(registers, row["registers"]),
            max(shared, row["shared"]),
        )
    return {
        target: {name: [len(variants), *rest] for name, (variants, *rest) in kernels.items()}
        for target, kernels in table.items()
    }


# one test, whose processes share out the work: that of a target is not worth a process
@pytest.mark.timeout(600)
def test_every_variant_compiles(record_property):
    rows = compile_for(*TARGETS, seconds=570)
    record_property("compiled", most(rows))
    judge(rows, TARGETS)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_every_variant_compiles_for_every_dtype_and_layout(record_property):
    rows = compile_for("--full", *TARGETS, seconds=7000)
    record_property("compiled", most(rows))
    judge(rows, TARGETS)
