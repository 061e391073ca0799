"""Errors against fp64 where student and teacher nearly agree: the table of docs/accuracy.md.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy/cpu.json
    python benchmarks/accuracy.py --docs docs/accuracy.md benchmarks/results/accuracy/*.json

The first measures every implementation that this device has, the second writes tables from such
files. Logits of the student are normal with deviation 3, the teacher's differ from them by normal
noise of the given size, both fp32. The error of a value is the worst of all rows, the error of a
gradient the norm of what is wrong over the norm of what is right. 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import vocabtp.kernels as vk
from results import facts
from vocabtp.kernels import reference

SCHEMA = 1
DIFFERENCES = (1e-1, 1e-2, 1e-3, 1e-4)
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward KL": ("kl_div", {}),
    "reverse KL": ("kl_div", {"reverse": True}),
    "JSD, beta 0.1": ("jsd", {"beta": 0.1}),
    "JSD, beta 0.5": ("jsd", {"beta": 0.5}),
    "JSD, beta 0.9": ("jsd", {"beta": 0.9}),
}
# what is promised of a value
KL_ABSOLUTE, JSD_RELATIVE = 1e-6, 1e-3
Row = dict[str, Any]
Arm = Literal["triton", "eager", "dense"]


def dense(s: Tensor, t: Tensor, *, reverse: bool = False, beta: float | None = None) -> Tensor:
    """The divergences as written with log_softmax in fp32, for comparison."""
    log_p, log_q = torch.log_softmax(s, -1), torch.log_softmax(t, -1)
    p, q = log_p.exp(), log_q.exp()
    if beta is None:
        return (p * (log_p - log_q) if reverse else q * (log_q - log_p)).sum(-1)
    log_m = (beta * q + (1 - beta) * p).log()
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)


def measure(arm: Arm, rows: int, cols: int, device: torch.device) -> Iterator[Row]:
    """A row for each call and difference."""
    for difference in DIFFERENCES:
        # on the CPU, so that devices see the same numbers
        g = torch.Generator().manual_seed(0)
        s = torch.randn(rows, cols, generator=g) * 3
        t = s + difference * torch.randn(rows, cols, generator=g)
        upstream = [torch.ones(rows, dtype=torch.float64)]
        for name, (function, options) in CALLS.items():
            truth = getattr(reference, function)(s, t, **options)
            right = reference.gradients(getattr(reference, function), [s, t], upstream, **options)
            leaves = [x.to(device, copy=True).requires_grad_() for x in (s, t)]
            if arm == "dense":
                values = dense(*leaves, **options)
            else:
                with vk.backend(arm):
                    values = getattr(vk, function)(*leaves, **options)
            values.sum().backward()  # type: ignore[no-untyped-call]
            error = (values.detach().double().cpu() - truth).abs()
            grads = [
                ((leaf.grad.double().cpu() - true).norm() / true.norm()).item()
                for leaf, true in zip(leaves, right, strict=True)
                if leaf.grad is not None
            ]
            yield {
                "arm": arm,
                "call": name,
                "difference": difference,
                "rows": rows,
                "cols": cols,
                "value": truth.mean().item(),
                "absolute": error.max().item(),
                "relative": (error / truth).max().item(),
                "student": grads[0],
                "teacher": grads[1],
            }


def broken(row: Row) -> str | None:
    """The bound that a row of ours does not keep."""
    if row["arm"] == "dense":
        return None
    if row["call"].startswith("JSD"):
        bad, bound = not row["relative"] <= JSD_RELATIVE, f"relative error {JSD_RELATIVE}"
    else:
        bad, bound = not row["absolute"] <= KL_ABSOLUTE, f"absolute error {KL_ABSOLUTE}"
    where = f"{row['arm']}, {row['call']}, differences {row['difference']}"
    return f"{where}: above {bound}: {row['absolute']:.2g}, {row['relative']:.2g}" if bad else None


def table(files: list[dict[str, Any]]) -> str:
    """Markdown: a line for each call and difference, columns for each implementation."""
    arms: dict[str, dict[tuple[str, float], Row]] = {}
    heads: dict[str, str] = {}
    for file in files:
        device = "the CPU" if file["run"]["device"] == "cpu" else file["run"]["device"]
        for row in file["results"]:
            name = f"{row['arm']}, {device}"
            arms.setdefault(name, {})[row["call"], row["difference"]] = row
            heads[name] = f"{name} ({row['rows']} x {row['cols']})"
    lines = [
        "Rows and columns in brackets. Each cell: value, gradient to the student, to the teacher."
    ]
    lines += ["", "| | differences | value | " + " | ".join(heads.values()) + " |"]
    lines += ["| --- " * (3 + len(arms)) + "|"]
    for call in CALLS:
        kind = "relative" if call.startswith("JSD") else "absolute"
        for difference in DIFFERENCES:
            found = [rows.get((call, difference)) for rows in arms.values()]
            values = [row["value"] for row in found if row]
            cells = [
                f"{row[kind]:.0e}, {row['student']:.0e}, {row['teacher']:.0e}" if row else ""
                for row in found
            ]
            head = f"| {call} ({kind}) | {difference:g} | {values[0]:.1e} | "
            lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command line; 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("files", nargs="*", type=Path, help="measured before, to be tabled")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cols", type=int, default=151_936)
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy.json"))
    parser.add_argument("--docs", type=Path, help="the page to write the table into")
    args = parser.parse_args(argv)
    if args.files:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    else:
        device = torch.device(args.device)
        arms: list[Arm] = ["eager", "dense"]
        if device.type != "cpu":
            arms.insert(0, "triton")
        results = [row for name in arms for row in measure(name, args.rows, args.cols, device)]
        run = {**facts(device, args.commit), "torch": torch.__version__}
        files = [{"schema": SCHEMA, "run": run, "results": results}]
        lines = ",\n".join(json.dumps(row) for row in results)
        text = f'{{"schema": {SCHEMA},\n"run": {json.dumps(run)},\n"results": [\n{lines}\n]}}\n'
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    made = table(files)
    print(made)
    if args.docs:
        page = args.docs.read_text(encoding="utf-8")
        marks = "<!-- begin: accuracy -->", "<!-- end: accuracy -->"
        whole = f"{marks[0]}\n\n{made}\n\n{marks[1]}"
        page, count = re.subn(f"{marks[0]}.*{marks[1]}", lambda _: whole, page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{args.docs}: needs {marks[0]} and {marks[1]} once")
        args.docs.write_text(page, encoding="utf-8")
    wrong = [said for file in files for row in file["results"] if (said := broken(row))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
