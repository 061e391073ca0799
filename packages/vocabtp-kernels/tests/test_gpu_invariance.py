"""A row's bits on an accelerator: alone, among 100 and 8192 rows, sliced, strided, by dtype."""

import pytest
import torch

import vocabtp.kernels as vk

INF = float("inf")
ROWS, WIDTH = 8_192, 75_968
PLACES = (0, 4_000, 8_191)
# the eager path launches a kernel for every few columns of every block of rows: fewer of them
BACKENDS = [("triton", WIDTH), ("triton", WIDTH - 1), ("eager", 3_001)]

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.fixture
def rows(device):
    """Logits, ids, upstream gradients."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    s = normal(ROWS, WIDTH) * 3
    t = s + normal(ROWS, WIDTH)
    # JSD's exact way, for the first of the places and many more
    t[:4_000:3] = s[:4_000:3] * 1.001
    s[:, 7], t[:, 7] = -INF, -INF
    index = torch.randint(8, WIDTH - 1, (ROWS, 3), generator=g, device=device)
    return s, t, index, normal(ROWS)


def run(call, s, t, index, upstream):
    """Values and gradients, each `[N, *]`."""
    leaves = [x.detach().requires_grad_() for x in (s, t)][: call.sides]
    values = call(*leaves, index=index, temperature=1.3)
    lead = [
        (upstream if v.shape == upstream.shape else upstream[:, None]).expand_as(v) for v in values
    ]
    return (*values, *torch.autograd.grad(values, leaves, lead))


def same(got, want, rows=slice(None)):
    for one, many in zip(got, want, strict=True):
        assert torch.equal(one, many[rows].to(one.dtype))


@pytest.mark.large
@pytest.mark.parametrize(("backend", "width"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_row_has_the_same_bits_in_any_company(call, dtype, width, backend, rows):
    s, t, index, upstream = rows
    index = index.clamp(max=width - 1)
    s, t = s.to(dtype)[:, :width], t.to(dtype)[:, :width]
    with vk.backend(backend):
        many = run(call, s, t, index, upstream)
        for at in PLACES:
            here = slice(at, at + 1)
            # contiguous where the many are strided; another alignment where they are not
            alone = [s[here].clone(), torch.cat([t[here, :1], t[here]], 1)[:, 1:]]
            same(run(call, *alone, index[here], upstream[here]), many, here)
        # among 100, most of them elsewhere before; every 64th row of all
        for some in (slice(3_950, 4_050), slice(None, None, 64)):
            same(run(call, s[some], t[some], index[some], upstream[some]), many, some)


@pytest.mark.large
@pytest.mark.parametrize(("backend", "width"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_has_the_bits_of_the_same_numbers_in_fp32(call, dtype, width, backend, rows):
    s, t, index, upstream = (x[3_500:4_524] for x in rows)
    index = index.clamp(max=width - 1)
    s, t = s.to(dtype)[:, :width], t.to(dtype)[:, :width]
    with vk.backend(backend):
        low = run(call, s, t, index, upstream)
        assert [x.dtype for x in low[-call.sides :]] == [dtype] * call.sides
        same(low, run(call, s.float(), t.float(), index, upstream))
        same(low[: -call.sides], run(call, s, t.float(), index, upstream)[: -call.sides])


@pytest.mark.parametrize("call", ["logprobs", "logprobs_and_entropy"], indirect=True)
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_ids_of_few_rows_and_of_many(call, dtype, backend, device):
    """Each of a row's programs finds by itself which of its ids share a column."""
    rows, width, ids = 2_000, 3_001, 300
    g = torch.Generator(device).manual_seed(1)
    s = (torch.randn(rows, width, generator=g, device=device) * 3).to(dtype)
    # of 100 columns, so that each comes several times, in tiles far apart
    index = torch.randint(0, 100, (rows, ids), generator=g, device=device) * 30
    index[::7, ::5] = -100
    upstream = torch.randn(rows, ids, generator=g, device=device)

    def both(some):
        leaf = s[some].requires_grad_()
        values = call(leaf, index=index[some])
        lead = [upstream[some] if v.dim() == 2 else upstream[some, 0] for v in values]
        return (*values, *torch.autograd.grad(values, leaf, lead))

    with vk.backend(backend):
        many = both(slice(None))
        for some in (slice(5, 6), slice(100)):
            same(both(some), many, some)
    assert all(x.isfinite().all() for x in many)
