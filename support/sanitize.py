"""Runs tests marked gpu under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck.

Usage: sanitize.py [--tool TOOL]... [pytest arguments]; without them every op runs on small cases.

What a tool reports is judged by the kernel that it names: PyTorch's own kernels load more than they
use, which initcheck calls an error. The allocator's cache is off, so that every tensor is an
allocation with an end and without old contents. 1 if a tool names one of this project's kernels, or
did not come to its summary, or if a test failed.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "packages" / "vocabtp-kernels"
TOOLS = ("memcheck", "racecheck", "initcheck")
# every op: a row of several tiles, an unaligned one, strides, masks, one column; ids; shards
DEFAULT = [str(KERNELS / "tests" / "test_gpu.py"), "-k", "test_kernels_alone"]


def kernel_names() -> set[str]:
    """Functions of the package that are compiled for a device."""
    names = set()
    for file in (KERNELS / "src" / "vocabtp" / "kernels" / "_triton").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.dump(decorator) for decorator in node.decorator_list
            ):
                names.add(node.name)
    return names


def reports(output: str) -> Iterator[str]:
    """The tool's paragraphs: lines that begin with a bar, an empty one between two reports."""
    lines: list[str] = []
    for line in output.splitlines():
        if not line.startswith("========="):
            continue
        if line.strip("= "):
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def check(tool: str, arguments: list[str]) -> bool:
    """Run the tests under one tool; whether it found nothing."""
    command = [
        *("compute-sanitizer", "--tool", tool, "--print-limit", "1000"),
        # calls that PyTorch makes to see whether they fail
        *(["--report-api-errors", "no"] if tool == "memcheck" else []),
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
        *("-o", "timeout=0", *arguments),
    ]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ours = re.compile(rf"\b({'|'.join(sorted(kernel_names()))})\b")
    found = [report for report in reports(done.stdout) if ours.search(report)]
    summary = re.findall(r"^=========.*SUMMARY.*$", done.stdout, re.MULTILINE)
    passed = re.findall(r"^=* ?\d+ passed.*$", done.stdout, re.MULTILINE)
    for report in found[:20]:
        print(report, end="\n\n")
    print(f"{tool}: {len(found)} reports of kernels of this project")
    print(f"{tool}: of all kernels: {' '.join(summary) or 'no summary'}")
    print(f"{tool}: pytest: {' '.join(passed) or 'no success'}", flush=True)
    if done.returncode != 0 or not summary or not passed:
        print(done.stdout[-8000:])
        return False
    return not found


def main(words: list[str]) -> int:
    """Each tool in turn; 0 if all are content."""
    tools = []
    while words[:1] == ["--tool"]:
        tools.append(words[1])
        words = words[2:]
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer must be on the PATH; it comes with the CUDA toolkit")
        return 1
    results = [check(tool, words or DEFAULT) for tool in tools or TOOLS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
