"""What an accelerator adds: other reductions, ids nobody waits for, offsets above 2^31."""

import math

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels.testing import CASES, check_case
from vocabtp.kernels.testing.cases import Case, run_case, truth_of
from vocabtp.kernels.testing.inputs import masked, narrow, normal, views, wide

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case, dtype, device):
    check_case(case, dtype=dtype, device=device)
    # the eager path is the yardstick above; here it is judged itself
    inputs = case.make().to(dtype, device)
    with vk.backend("eager"):
        actual, truth = run_case(case, inputs), truth_of(case, inputs)
    size = truth.size()
    for value, right in zip(actual.values, truth.values, strict=True):
        torch.testing.assert_close(
            value.double().cpu(), right, rtol=4e-6, atol=4e-6 * size, equal_nan=True
        )
    for grad, right in zip(actual.grads, truth.grads, strict=True):
        rtol = torch.finfo(dtype).eps / 2 + 4e-6
        torch.testing.assert_close(
            grad.double().cpu(), right, rtol=rtol, atol=4e-6 * size + 6e-8, equal_nan=True
        )


def test_shards(call, device):
    width = normal().student.shape[-1]
    bounds = [(0, 0), (0, 300), (300, width)]
    check_case(Case(call.name, normal), device=device, bounds=bounds, slack=4.0)


# the tests that support/sanitize.py runs: the eager path launches thousands of times more
ALONE = [
    *((make, torch.bfloat16, None) for make in (normal, narrow, wide, masked, views)),
    (wide, torch.float32, None),
    (normal, torch.float32, ((0, 0), (0, 300), (300, 1009))),
]


@pytest.mark.parametrize(("make", "dtype", "bounds"), ALONE)
def test_kernels_alone(call, make, dtype, bounds, device):
    case = Case(call.name, make)
    inputs = make().to(dtype, device)
    actual, truth = run_case(case, inputs, bounds=bounds), truth_of(case, inputs)
    size = truth.size()
    for kind, rtol in (("values", 0.0), ("grads", torch.finfo(dtype).eps / 2)):
        for found, right in zip(getattr(actual, kind), getattr(truth, kind), strict=True):
            torch.testing.assert_close(
                found.double().cpu(), right, rtol=rtol + 4e-6, atol=4e-6 * size, equal_nan=True
            )


def test_batch_invariance(call, device):
    g = torch.Generator().manual_seed(0)
    s, t = ((torch.randn(70, 5_004, generator=g) * 3).to(device) for _ in range(2))
    index = torch.randint(0, 5_003, (70, 2), generator=g).to(device)

    def run(rows, dense):
        leaves = [x[rows, :-1] for x in (s, t)][: call.sides]
        leaves = [(x.clone() if dense else x).detach().requires_grad_() for x in leaves]
        values = call(*leaves, index=index[rows])
        return (*values, *torch.autograd.grad([v.sum() for v in values], leaves))

    batch = run(slice(None), False)
    for at in (0, 33, 69):
        for one, many in zip(run(slice(at, at + 1), True), batch, strict=True):
            assert torch.equal(one[0], many[at])


def test_a_bad_id_is_reported_without_waiting(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, 5], [-100, 4]], device=device)
    lp = vk.logprobs(x, ids)
    assert lp[1].isnan().all()
    assert lp[[0, 2]].isfinite().all()
    with pytest.raises(ValueError, match=r"logprobs: an id .* got 5 at position \[1\]"):
        vk.entropy(x)
    vk.check_ids()
    vk.logprobs(x, ids)
    with pytest.raises(ValueError, match="got 5"):
        vk.check_ids()
    with pytest.raises(ValueError, match="got 5"):
        vk.logprobs(x, ids, validate_ids=True)
    vk.check_ids()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_waits_for_the_ids_of_the_one_before_and_for_nothing_else(call, device, waits):
    if device.type != "cuda":
        return
    s, t = (torch.randn(4, 1000, device=device, requires_grad=True) for _ in range(2))
    index = torch.zeros(4, 2, dtype=torch.int64, device=device)

    def step():
        values = call(s, t, index=index)
        torch.autograd.grad([v.sum() for v in values], [s, t][: call.sides])

    vk.check_ids()
    step()
    waits.clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == call.takes_ids
    vk.check_ids()
    torch.cuda.synchronize()
    waits.clear()
    # half a second, behind which everything stays undone unless somebody waits
    torch.cuda._sleep(1_000_000_000)
    step()
    assert not torch.cuda.current_stream().query()
    assert not waits
    vk.check_ids()
    assert len(waits) == call.takes_ids


def test_autocast_does_not_reach_inside(call, device):
    s, t = (torch.randn(4, 100, device=device) for _ in range(2))
    index = torch.zeros(4, dtype=torch.int64, device=device)
    right = call(s, t, index=index)
    with torch.autocast(device.type, torch.bfloat16):
        values = call(s, t, index=index)
    assert all(torch.equal(a, b) for a, b in zip(values, right, strict=True))


@pytest.mark.large
def test_row_offsets_above_2_to_the_31(device):
    # 13 GiB with the gradient: rows past element 2^31 of a bf16 tensor
    rows, width = 16_500, 131_072
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    x[:, 3] = 8
    x.requires_grad_()
    ids = torch.full((rows,), 3, device=device)
    lp, h = vk.logprobs(x, ids), vk.entropy(x)
    (lp.sum() + h.sum()).backward()
    z = math.exp(8) + width - 1
    for values, right in ((lp, 8 - math.log(z)), (h, math.log(z) - 8 * math.exp(8) / z)):
        assert (values.double() - right).abs().max().item() < 4e-6
    for first in range(0, rows, 1_000):
        assert (x.grad[first : first + 1_000] == x.grad[0]).all()
    assert x.grad[0].abs().sum() > 0
    one = x.detach()[:1].clone().requires_grad_()
    (vk.logprobs(one, ids[:1]) + vk.entropy(one)).sum().backward()
    assert torch.equal(one.grad[0], x.grad[-1])
    kl = vk.kl_div(x, x.detach(), reverse=True)
    assert (kl == 0).all()
