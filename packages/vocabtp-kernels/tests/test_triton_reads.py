"""No kernel reads beside a view: under the interpreter, where each address is seen."""

import numpy as np
import pytest
import torch

import vocabtp.kernels as vk

pytestmark = pytest.mark.usefixtures("interpreter")

# so that rows begin anywhere in 16 bytes, and those of the gradient elsewhere
ROWS = 8
# elements before the first row in its buffer, and between two rows
PLACES = [(0, 1), (3, 0), (5, 4)]


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


def beside(rows, reads):
    """Bytes of a view's buffer that were read and are not of the view."""
    size, begin = rows.element_size(), rows.untyped_storage().data_ptr()
    mine = np.zeros(rows.untyped_storage().nbytes(), dtype=bool)
    for row in rows:
        at = row.data_ptr() - begin
        mine[at : at + row.numel() * size] = True
    found = set()
    for addresses, width in reads:
        at = addresses.astype(np.int64) - begin
        for each in range(width):
            inside = at[(at + each >= 0) & (at + each < mine.size)] + each
            found.update(inside[~mine[inside]].tolist())
    return sorted(found)


@pytest.mark.parametrize(
    ("call", "dtype", "columns"),
    [
        *(("logprobs", torch.bfloat16, columns) for columns in (1, 131, 136)),
        ("logprobs", torch.float32, 131),
        ("reverse_kl", torch.bfloat16, 131),
        ("jsd", torch.bfloat16, 131),
    ],
    indirect=["call"],
)
def test_no_byte_beside_a_view_is_read(call, dtype, columns, small, reads):
    for number, (first, between) in enumerate(PLACES):
        sides = [view(columns, first, between, dtype, number)]
        # the other one begins elsewhere
        sides.append(view(columns, (3 * first + 1) % 9, between + 1, dtype, number))
        sides = sides[: call.sides]
        index = torch.tensor([[0, columns - 1]] * ROWS)
        reads.clear()
        with vk.backend("triton"):
            leaves = [x.detach().requires_grad_() for x in sides]
            values = call(*leaves, index=index)
            grads = torch.autograd.grad([v.sum() for v in values], leaves)
        for side in sides:
            assert not beside(side, reads), (first, between)
        truths = call.true_gradients(
            *sides, upstream=[torch.ones_like(v) for v in values], index=index
        )
        for grad, truth in zip(grads, truths, strict=True):
            torch.testing.assert_close(grad.double(), truth, rtol=1e-2, atol=1e-4)
