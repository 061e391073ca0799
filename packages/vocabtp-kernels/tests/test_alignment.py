"""What kernels are told of addresses is so: of every row, however rows lie in memory."""

import itertools

import pytest
import torch

from vocabtp.kernels._rows import Rows, as_rows
from vocabtp.kernels._triton import launch

# of the student, and of the teacher and its gradient
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
# columns, and positions of a sequence: whole lines of 128 bytes, 16 bytes, and neither
COLUMNS = (64, 72, 75, 1)
POSITIONS = (1, 3, 8, 64)


def addresses(rows: Rows) -> torch.Tensor:
    """Where each row begins, in bytes."""
    inner, outer_stride, inner_stride = launch.strides(rows)
    row = torch.arange(rows.num_rows)
    offset = (row // inner) * outer_stride + (row % inner) * inner_stride
    return rows.blocks.data_ptr() + offset * rows.blocks.element_size()


def layouts(batch, positions, columns, dtype):
    """Tensors `[batch, positions, columns]` that are read in place."""
    whole = torch.empty(batch, positions + 1, columns + 1, dtype=dtype)
    yield "contiguous", torch.empty(batch, positions, columns, dtype=dtype)
    yield "last position cut", torch.empty(batch, positions + 1, columns, dtype=dtype)[:, :-1]
    yield "first position cut", torch.empty(batch, positions + 1, columns, dtype=dtype)[:, 1:]
    yield "columns cut", torch.empty(batch, positions, columns + 1, dtype=dtype)[..., 1:]
    yield "both cut", whole[:, :-1, :-1]
    yield "turned", torch.empty(positions, batch, columns, dtype=dtype).transpose(0, 1)


def promised(sides, outs, found):
    """Every promise that `found` makes: what it is of, and whether each row keeps it."""
    followed = [x for x in outs if x is not None] or sides
    lead = followed[bool(found.get("LEAD_B"))]
    size = lead.blocks.element_size()
    phase = addresses(lead) % 128 // size if found["SHIFT"] else 0
    for kind, tensors in (("WIDE", sides), ("WIDE_OUT", outs)):
        for letter, rows in zip("AB", tensors, strict=False):
            if found.get(f"{kind}_{letter}"):
                address = addresses(rows) - phase * rows.blocks.element_size()
                yield f"{kind}_{letter}", bool((address % 16 == 0).all())
    if outs:
        # a leading gradient keeps its own promise; words are for sides of two bytes alone
        wide = [found[f"WIDE_{letter}"] for letter, _ in zip("AB", sides, strict=False)]
        short = [not so and x.blocks.element_size() == 2 for so, x in zip(wide, sides, strict=True)]
        yield "WORDS", found["WORDS"] == any(short) and found["SHIFT"] >= found["WORDS"]
    if len(outs) == 2:
        yield "WIDE_OUT", found["WIDE_OUT_A"] or found["WIDE_OUT_B"]


@pytest.mark.parametrize(("dtype", "other"), DTYPES, ids=str)
def test_promises_hold(dtype, other):
    made = 0
    shapes = [(1, 3, 75), *itertools.product((3,), POSITIONS, COLUMNS)]
    for batch, positions, columns in shapes:
        # a cut one is of so many positions before: of 64, too
        for shape in ((batch, positions, columns), (batch, max(positions - 1, 1), columns)):
            ways = [
                [(name, as_rows(x)) for name, x in layouts(*shape, kind)] for kind in (dtype, other)
            ]
            # gradients too may begin anywhere: at 16 bytes of one dtype, 8 of the other
            start = (0, 4, 8, 3)[POSITIONS.index(positions)]
            size = shape[0] * shape[1] * columns
            written = [
                torch.empty(start + size, dtype=kind)[start:].view(-1, columns)
                for kind in (dtype, other)
            ]
            outs = [Rows(out.unsqueeze(0)) for out in written]
            for (one, a), (two, b) in itertools.product(*ways):
                for sides, given in (
                    ((a,), ()),
                    ((a, b), ()),
                    ((a,), (0,)),
                    ((a, b), (0, None)),
                    ((a, b), (None, 1)),
                    ((a, b), (0, 1)),
                ):
                    tensors = [None if n is None else written[n] for n in given]
                    found = (
                        launch.grad_alignment(sides, tensors) if given else launch.alignment(*sides)
                    )
                    rows = [None if n is None else outs[n] for n in given]
                    for name, kept in promised(sides, rows, found):
                        assert kept, (shape, one, two, given, name, found)
                        made += 1
    assert made > 10_000


def test_whole_lines_are_promised_where_they_are():
    """So that nothing is lost: the usual layouts have wide loads and stores on both sides."""
    for dtype, columns in itertools.product((torch.bfloat16, torch.float32), (64, 75)):
        logits = as_rows(torch.empty(4, 33, columns, dtype=dtype))
        out = torch.empty(4 * 33, columns, dtype=dtype)
        found = launch.grad_alignment([logits, logits], [out, out])
        starts = logits.blocks.data_ptr() % 16 == out.data_ptr() % 16
        assert {k: v for k, v in found.items() if k.startswith("WIDE_")} == {
            "WIDE_A": starts or columns == 64,
            "WIDE_B": starts or columns == 64,
            "WIDE_OUT_A": True,
            "WIDE_OUT_B": True,
        }
