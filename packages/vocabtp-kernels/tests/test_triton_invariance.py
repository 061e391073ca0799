"""A row's bits on Triton: alone, among 100, sliced, strided, in each dtype; interpreted.

test_gpu_invariance.py says the same of compiled kernels, both implementations and real sizes.
"""

import pytest
import torch

import vocabtp.kernels as vk

INF = float("inf")
ROWS, WIDTH = 100, 150

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def run(call, s, t, index, upstream):
    """Values and gradients, each `[N, *]`."""
    leaves = [s.detach().requires_grad_(), t.detach().requires_grad_()][: call.sides]
    with vk.backend("triton"):
        values = call(*leaves, index=index, temperature=1.3)
    lead = [
        (upstream if v.shape == upstream.shape else upstream[:, None]).expand_as(v) for v in values
    ]
    return (*values, *torch.autograd.grad(values, leaves, lead))


def same(got, want):
    for one, many in zip(got, want, strict=True):
        assert torch.equal(one, many.to(one.dtype))


@pytest.fixture(scope="module")
def rows():
    g = torch.Generator().manual_seed(3)
    s = torch.randn(ROWS, WIDTH + 2, generator=g) * 4
    t = s + torch.randn(ROWS, WIDTH + 2, generator=g)
    t[50] = s[50] * 1.0005  # JSD's exact way
    s[:, 8], t[:, 7] = -INF, -INF  # the same column of the views below
    index = torch.randint(0, 7, (ROWS, 2), generator=g)
    return s, t, index, torch.randn(ROWS, generator=g)


# an interpreted program takes 10 ms
@pytest.mark.parametrize("call", ["logprobs_and_entropy", "reverse_kl", "jsd"], indirect=True)
def test_row_has_the_same_bits_in_any_company(call, rows):
    s, t, index, upstream = rows
    s, t = s.bfloat16(), t.bfloat16()
    many = run(call, s[:, 1:-1], t[:, :-2], index, upstream)
    for at in (49, 50, 99):
        here = slice(at, at + 1)
        alone = [s[here, 1:-1].clone(), t[here, :-2].clone()]
        same(run(call, *alone, index[here], upstream[here]), [x[here] for x in many])
    some = slice(40, 60, 5)
    same(
        run(call, s[some, 1:-1], t[some, :-2], index[some], upstream[some]),
        [x[some] for x in many],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_has_the_bits_of_the_same_numbers_in_fp32(call, rows, dtype):
    s, t, index, upstream = (x[49:51] for x in rows)
    s, t = s.to(dtype), t.to(dtype)
    low = run(call, s[:, 1:-1], t[:, :-2], index, upstream)
    assert [x.dtype for x in low[-call.sides :]] == [dtype] * call.sides
    # contiguous here, strided there
    wide = [s.float()[:, 1:-1].clone(), t.float()[:, :-2].clone()]
    same(low, run(call, *wide, index, upstream))


@pytest.mark.parametrize("call", ["logprobs_and_entropy", "reverse_kl", "jsd"], indirect=True)
def test_a_row_past_element_2_to_the_31(call):
    """Rows that far apart; what lies between them, 4 GiB of nothing, is never touched."""
    stride = 2**30 + 24
    buffers = [torch.empty(2 * stride + 40, dtype=torch.bfloat16) for _ in range(2)]
    sides = [x.as_strided((3, 40), (stride, 1)) for x in buffers]
    g = torch.Generator().manual_seed(6)
    for side in sides:
        side.copy_(torch.randn(3, 40, generator=g))
    index, upstream = torch.tensor([[0, 39]] * 3), torch.randn(3, generator=g)
    near = run(call, *[x.clone() for x in sides], index, upstream)
    same(run(call, *sides, index, upstream), near)
