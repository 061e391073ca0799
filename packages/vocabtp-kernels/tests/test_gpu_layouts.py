"""Layouts whose rows begin at other addresses than a contiguous tensor's: loads of 16 bytes there
end with an error of the device if a kernel was promised too much."""

import pytest
import torch

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def layouts(columns, device, dtype):
    """Ways to hold three sequences of 63 positions."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    yield normal(3, 63, columns)
    # sequences are whole lines of 128 bytes apart, rows are not
    yield normal(3, 64, columns)[:, :-1]
    yield normal(3, 64, columns)[:, 1:]
    yield normal(3, 63, columns + 1)[..., 1:]
    yield normal(63, 3, columns).transpose(0, 1)


@pytest.mark.parametrize("columns", [5_025, 5_032, 9_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pair_of_layouts_has_the_bits_of_contiguous_ones(call, dtype, columns, device):
    upstream = torch.randn(3, 63, device=device)
    index = torch.randint(0, columns, (3, 63, 2), device=device)
    for a in layouts(columns, device, dtype):
        for b in layouts(columns, device, dtype) if call.sides == 2 else [a]:
            results = []
            for sides in ((a, b), (a.contiguous(), b.contiguous())):
                leaves = [x.detach().requires_grad_() for x in sides][: call.sides]
                values = call(*leaves, index=index)
                lead = [upstream if v.dim() == 2 else upstream[..., None] for v in values]
                grads = torch.autograd.grad(
                    values, leaves, [u.expand_as(v) for u, v in zip(lead, values, strict=True)]
                )
                results.append((*values, *grads))
            torch.accelerator.synchronize()
            for got, want in zip(*results, strict=True):
                assert torch.equal(got, want)
