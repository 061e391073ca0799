"""More than 2^31 elements: every op's kernels at the far end of a tensor, forward and backward."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.large]

# the last 7 rows begin past element 2^31; 4 GiB of bf16
ROWS, WIDTH = 8_192, 262_400
FAR = [0, 1, 4_095, 4_096, *range(ROWS - 12, ROWS)]


@pytest.fixture(scope="module")
def big():
    device = torch.accelerator.current_accelerator()
    assert device is not None
    g = torch.Generator(device).manual_seed(0)
    sides = [
        torch.randn(ROWS, WIDTH, generator=g, device=device, dtype=torch.bfloat16) for _ in range(2)
    ]
    assert (ROWS - 7) * WIDTH > 2**31
    # JSD's exact way in one of the far rows
    sides[1][-2] = sides[0][-2]
    sides[1][-2, ::7] += 0.01
    index = torch.randint(0, WIDTH, (ROWS, 3), generator=g, device=device)
    return *sides, index


def run(call, sides, index):
    leaves = [x.detach().requires_grad_() for x in sides[: call.sides]]
    values = call(*leaves, index=index)
    return (*values, *torch.autograd.grad([v.sum() for v in values], leaves))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_far_rows_have_the_bits_that_they_have_alone(call, turned, big):
    *sides, index = big
    alone = run(call, [x[FAR] for x in sides], index[FAR])
    if turned:
        # two strides: neighbours in the result are half the tensor apart
        sides = [x.view(2, ROWS // 2, WIDTH).transpose(0, 1) for x in sides]
        index = index.view(2, ROWS // 2, 3).transpose(0, 1)
    for many, few in zip(run(call, sides, index), alone, strict=True):
        if turned:
            many = many.transpose(0, 1)
        at = torch.tensor(FAR, device=many.device)
        part = many[at // (ROWS // 2), at % (ROWS // 2)] if turned else many[at]
        assert torch.equal(part, few)
        assert few.abs().sum() > 0
