"""Gradients read a view and nothing beside it: under the interpreter, which sees each address."""

import numpy as np
import pytest
import torch

import vocabtp.kernels as vk

pytestmark = pytest.mark.usefixtures("interpreter")

ROWS = 4
# elements before the first row in its buffer, and between two rows: more than a word of one side
# reaches beyond it, so that nothing is taken for the next row's
PLACES = [(0, 5), (3, 4), (5, 7)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def reads(monkeypatch):
    """Every address that is read, with how many bytes, since the list was emptied."""
    from triton.runtime import interpreter

    seen = []
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def loaded(made, ptrs, mask, *rest):
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        seen.append((np.atleast_1d(ptrs.data[mask.data.astype(bool)]), size))
        return load(made, ptrs, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", loaded)
    return seen


def view(columns, first, between, dtype, seed):
    """Rows of a buffer that holds more before, between and after them."""
    g = torch.Generator().manual_seed(seed)
    step = columns + between
    buffer = torch.randn(first + ROWS * step + 16, generator=g).to(dtype)
    return buffer.as_strided((ROWS, columns), (step, 1), first)


def bytes_of(rows, reads):
    """Bytes of a view's buffer: which are of the view, and which were read."""
    size, begin = rows.element_size(), rows.untyped_storage().data_ptr()
    mine = np.zeros(rows.untyped_storage().nbytes(), dtype=bool)
    seen = np.zeros_like(mine)
    for row in rows:
        at = row.data_ptr() - begin
        mine[at : at + row.numel() * size] = True
    for addresses, width in reads:
        at = addresses.astype(np.int64) - begin
        for each in range(width):
            seen[at[(at + each >= 0) & (at + each < mine.size)] + each] = True
    return mine, seen


@pytest.mark.parametrize(
    ("call", "dtypes", "needs", "columns"),
    [
        *(("logprobs", (BF16,), (True,), columns) for columns in (1, 131, 136)),
        ("logprobs", (FP32,), (True,), 131),
        ("reverse_kl", (BF16, BF16), (True, True), 131),
        ("reverse_kl", (FP16, FP32), (False, True), 131),
        ("jsd", (BF16, BF16), (True, False), 131),
    ],
    indirect=["call"],
)
def test_every_byte_of_a_view_is_read_and_none_beside(call, dtypes, needs, columns, small, reads):
    for number, (first, between) in enumerate(PLACES):
        # the other one begins elsewhere
        places = ((first, between), ((3 * first + 1) % 9, between + 1))
        sides = [
            view(columns, *place, dtype, number)
            for place, dtype in zip(places, dtypes, strict=False)
        ]
        leaves = [x.detach().requires_grad_(n) for x, n in zip(sides, needs, strict=True)]
        index = torch.tensor([[0, columns - 1]] * ROWS)
        with vk.backend("triton"):
            values = call(*leaves, index=index)
            reads.clear()
            needed = [x for x in leaves if x.requires_grad]
            grads = torch.autograd.grad([v.sum() for v in values], needed)
        for side in sides:
            mine, seen = bytes_of(side, reads)
            assert np.array_equal(mine, seen), (first, between, np.flatnonzero(mine != seen))
        ones = [torch.ones_like(v) for v in values]
        truths = call.true_gradients(*sides, upstream=ones, index=index)
        truths = [truth for truth, n in zip(truths, needs, strict=True) if n]
        for grad, truth in zip(grads, truths, strict=True):
            torch.testing.assert_close(grad.double(), truth, rtol=1e-2, atol=1e-4)
