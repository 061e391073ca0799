"""Markdown tables from results. A table without a measurement is an empty text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from arms import NAMES
from cases import CASES
from results import Result

MAIN = (8192, 75968)
SHAPES = (MAIN, (1024, 151936), (64, 75968))
LABELS = {
    "triton": "Triton",
    "eager": "eager",
    "compile": "torch.compile",
    "dense": "dense",
    "deepspeed": "DeepSpeed",
    "liger": "Liger",
    "trl": "TRL",
}
OPS = {
    "reverse_kl": "reverse KL",
    "forward_kl": "forward KL",
    "jsd": "JSD",
    "entropy": "entropy",
    "logprobs": "logprobs, k=1",
    "logprobs_k256": "logprobs, k=256",
    "logprobs_and_entropy": "logprobs and entropy",
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_PLACE = ("kind", "op", "mode", "arm", "dtype", "layout", "rows", "cols", "world")


def place(result: Result) -> tuple[object, ...]:
    """What a measurement is of, on whatever device."""
    return tuple(result.get(name) for name in _PLACE)


class Book(NamedTuple):
    """All results of a device, and the runs that they name by position."""

    runs: list[dict[str, Any]]
    found: dict[tuple[object, ...], Result]

    def get(
        self,
        op: str,
        mode: str,
        arm: str,
        dtype: str,
        shape: tuple[int, int],
        layout: str = "contiguous",
    ) -> Result | None:
        """One measurement on one device."""
        return self.found.get(("op", op, mode, arm, dtype, layout, *shape, 1))

    def ops(self) -> list[Result]:
        """The measurements on one device."""
        return [result for result in self.found.values() if result["kind"] == "op"]

    def have(self, what: str, among: Iterable[Any]) -> list[Any]:
        """Which of some sizes, dtypes or arms were measured."""
        seen = {result[what] for result in self.ops()}
        return [x for x in among if x in seen]

    def values(self, what: str) -> list[Any]:
        """All that were measured, in ascending order."""
        return sorted({result[what] for result in self.ops()})


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A Markdown table, with a line above it; nothing for no rows."""
    body = [f"| {' | '.join(row)} |" for row in rows if any(row[1:])]
    if not body:
        return ""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join([' --- '] + [' ---: '] * (len(head) - 1))}|"]
    return "\n".join([*([f"{caption}\n"] if caption else []), *lines, *body])


def status(result: Result | None) -> str:
    """What stands in the place of a number that there is none of."""
    if result is None:
        return ""
    return {"oom": "OOM"}.get(result["status"], result["status"])


def good(result: Result | None) -> bool:
    """Whether it was timed."""
    return result is not None and result["status"] == "ok"


def cell(result: Result | None) -> str:
    """Milliseconds, and how many times the byte floor."""
    if result is None or not good(result):
        return status(result)
    return f"{ms(result['median_ms'])} ({times(result['floor'])})"


def ms(value: float) -> str:
    """Milliseconds to three figures."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def machine(book: Book) -> str:
    """Where the results come from."""
    used = sorted({result["run"] for result in book.found.values()})
    rows = []
    for run in (book.runs[i] for i in used):
        versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items() if v)
        what = f"{run['world']} ranks, {run['backend']}" if "world" in run else "1 device"
        copy = f"{run['copy_gb_s'] / 1000:.3g} TB/s" if "copy_gb_s" in run else ""
        commit = (run["commit"] or "unknown")[:10]
        rows.append([run["device"], what, copy, versions, commit, run["date"][:10]])
    head = ("device", "run", "copy", "versions", "commit", "date")
    absent = {k: v for run in book.runs for k, v in run.get("absent", {}).items()}
    seen = set(book.values("arm"))
    notes = [f"{LABELS[k]}: {v}." for k, v in absent.items() if k not in seen]
    return "\n\n".join(filter(None, [table(head, rows), " ".join(notes)]))


def shapes(book: Book) -> str:
    """Every arm at the shapes where all are measured, forward and backward."""
    arms = book.have("arm", NAMES)
    found = []
    for dtype in book.have("dtype", SHORT):
        for shape in SHAPES:
            rows = (
                [label, *(cell(book.get(op, "train", arm, dtype, shape)) for arm in arms)]
                for op, label in OPS.items()
            )
            caption = f"**{shape[0]} x {shape[1]}, {SHORT[dtype]}**"
            found.append(table(["op", *(LABELS[arm] for arm in arms)], rows, caption))
    return "\n\n".join(filter(None, found))


def detail(book: Book) -> str:
    """Spread, forward alone and memory at the main shape."""
    head = ("op", "arm", "forward ms", "forward + backward ms", "p20", "p80", "x floor", "peak MiB")
    found = []
    for dtype in book.have("dtype", SHORT):
        rows = _detail_rows(book, dtype)
        found.append(table(head, rows, f"**{MAIN[0]} x {MAIN[1]}, {SHORT[dtype]}**"))
    return "\n\n".join(filter(None, found))


def _detail_rows(book: Book, dtype: str) -> Iterator[list[str]]:
    for op, label in OPS.items():
        for arm in book.have("arm", NAMES):
            forward = book.get(op, "forward", arm, dtype, MAIN)
            train = book.get(op, "train", arm, dtype, MAIN)
            if train is None:
                continue
            alone = ms(forward["median_ms"]) if forward and good(forward) else status(forward)
            if not good(train):
                yield [label, LABELS[arm], alone, status(train), "", "", "", ""]
                continue
            spread = [ms(train[name]) for name in ("median_ms", "p20_ms", "p80_ms")]
            peak = f"{train['peak_mib']:.0f}" if "peak_mib" in train else ""
            yield [label, LABELS[arm], alone, *spread, times(train["floor"]), peak]


def both_gradients(book: Book) -> str:
    """Gradients to the student and to the teacher."""
    arms = book.have("arm", NAMES)
    rows = (
        [
            f"{OPS[op]}, {SHORT[dtype]}",
            *(cell(book.get(op, "train_both", a, dtype, MAIN)) for a in arms),
        ]
        for dtype in book.have("dtype", SHORT)
        for op, case in CASES.items()
        if case.sides == 2
    )
    return table([f"{MAIN[0]} x {MAIN[1]}", *(LABELS[arm] for arm in arms)], rows)


def few_rows(book: Book) -> str:
    """Triton beside torch.compile where rows are few, forward and backward."""
    sizes = book.have("rows", (64, 256, 1024))
    found = []
    for dtype in book.have("dtype", SHORT):
        rows = []
        for op, label in OPS.items():
            cells = []
            for size in sizes:
                pair = [
                    book.get(op, "train", a, dtype, (size, MAIN[1])) for a in ("triton", "compile")
                ]
                ours, theirs = pair
                ratio = ""
                if ours and theirs and good(ours) and good(theirs):
                    ratio = times(theirs["median_ms"] / ours["median_ms"])
                cells += [cell(ours), cell(theirs), ratio]
            rows.append([label, *cells])
        head = [f"{n} rows, {x}" for n in sizes for x in ("Triton", "torch.compile", "faster by")]
        found.append(table(["op", *head], rows, f"**{MAIN[1]} columns, {SHORT[dtype]}**"))
    return "\n\n".join(filter(None, found))


def grid(book: Book, arm: str) -> str:
    """An arm's time over the byte floor everywhere; contiguous / sliced / window."""
    widths = book.values("cols")
    found = []
    for dtype in book.have("dtype", SHORT):
        rows = []
        for op, label in OPS.items():
            for size in book.values("rows"):
                cells = []
                for width in widths:
                    pair = (
                        book.get(op, "train", arm, dtype, (size, width), layout)
                        for layout in ("contiguous", "sliced", "window")
                    )
                    both = [times(r["floor"])[:-1] if r and good(r) else status(r) for r in pair]
                    cells.append(" / ".join(filter(None, both)))
                rows.append([f"{label}, {size} rows", *cells])
        found.append(table([SHORT[dtype], *map(str, widths)], rows))
    return "\n\n".join(filter(None, found))


def sharded(book: Book) -> str:
    """Sharded JSD and its alternatives."""
    head = (
        "route",
        "ranks",
        "rows x V",
        "peak GiB a rank",
        "median ms",
        "p20",
        "p80",
        "back to back ms",
    )
    rows = []
    for result in book.found.values():
        if result["kind"] != "tp":
            continue
        name = OPS[result["op"]] + (f", beta {result['beta']}" if result["op"] == "jsd" else "")
        cells = [f"{result['arm']}, {name}", str(result["world"])]
        cells.append(f"{result['rows']} x {result['cols']}, {SHORT[result['dtype']]}")
        if good(result):
            keys = ("median_ms", "p20_ms", "p80_ms", "back_to_back_ms")
            cells += [f"{result.get('peak_gib', '')}", *(ms(result[k]) for k in keys)]
        else:
            cells += ["", status(result), "", "", ""]
        rows.append(cells)
    return table(head, rows)
