"""The Triton kernels compiled, at real shapes; the conformance cases run in test_gpu.py."""

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference
from vocabtp.kernels.testing import assert_no_worse

INF = float("inf")
V = 151_936

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def sides(rows, width, device, dtype=torch.float32, difference=1.0):
    g = torch.Generator(device).manual_seed(0)
    s = torch.randn(rows, width, generator=g, device=device) * 3
    t = s + difference * torch.randn(rows, width, generator=g, device=device)
    return s.to(dtype), t.to(dtype)


def run(call, s, t, index, **options):
    leaves = [x.detach().requires_grad_() for x in (s, t)][: call.sides]
    values = call(*leaves, index=index, **options)
    return (*values, *torch.autograd.grad([v.sum() for v in values], leaves))


def test_it_is_chosen(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(2, 3, device=device, dtype=dtype)
        assert vk.which_backend(x)[0] == "triton"
    assert vk.which_backend(x.double()) == ("eager", "fp64 runs in eager PyTorch")
    with vk.backend("eager"):
        assert vk.which_backend(x)[0] == "eager"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [32_000, 37_984, 75_967, V, 262_150])
def test_real_widths(call, width, dtype, device):
    s, t = sides(5, width, device, dtype)
    s[0, : width // 2], t[0, : width // 2] = -INF, -INF
    index = torch.randint(width // 2, width, (5, 2), device=device)
    actual = run(call, s, t, index)
    with vk.backend("eager"):
        eager = run(call, s, t, index)
    values = call.truth(s, t, index=index)
    wide = [s.double(), t.double()][: call.sides]
    grads = call.true_gradients(*wide, upstream=[torch.ones_like(v) for v in values], index=index)
    size = max(1.0, *(v.abs().max().item() for v in values))
    for mine, yardstick, right in zip(actual, eager, (*values, *grads), strict=True):
        # twice that of the conformance cases: the hardware logarithm of JSD's quick way
        floor = 4 * torch.finfo(torch.float32).eps * size
        assert_no_worse(mine, yardstick, right, floor=floor, what=call.name)
    for found in (actual, eager):
        call.assert_each_near(found[len(values) :], grads, *wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [20_001, 37_984])
def test_a_rows_bits(call, width, dtype, device):
    """Alone, in company, strided, at another alignment, and as fp32 of the same numbers."""
    s, t = sides(300, width + 3, device, dtype)
    t[:100] = (s[:100].float() * 1.0002).to(dtype)
    s[:, 7], t[:, 7] = -INF, -INF
    index = torch.randint(8, width, (300, 3), device=device)
    batch = run(call, s[:, :width], t[:, :width], index, temperature=1.3)

    def same(got, want):
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))

    for at in (0, 150, 299):
        here = slice(at, at + 1)
        alone = [x[here, :width].clone() for x in (s, t)]
        same(run(call, *alone, index[here], temperature=1.3), [x[here] for x in batch])
    some = slice(13, 77)
    same(
        run(call, s[some, :width], t[some, :width], index[some], temperature=1.3),
        [x[some] for x in batch],
    )
    moved = torch.empty(300, width + 5, dtype=dtype, device=device)
    moved[:, 1 : width + 1] = s[:, :width]
    same(run(call, moved[:, 1 : width + 1], t[:, :width], index, temperature=1.3), batch)
    full = run(call, s[:, :width].float(), t[:, :width].float(), index, temperature=1.3)
    same(batch, full)


@pytest.mark.parametrize("difference", [1e-4, 1e-3, 1e-2, 1e-1])
def test_nearly_equal_sides(difference, device):
    s, t = sides(3, V, device, difference=difference)
    for beta in (0.02, 0.1, 0.5, 0.9):
        leaf = s.clone().requires_grad_()
        value = vk.jsd(leaf, t, beta=beta)
        value.sum().backward()
        truth = reference.jsd(s, t, beta=beta)
        assert ((value - truth).abs() <= 1e-3 * truth).all()
        upstream = [torch.ones(3, device=device)]
        right = reference.gradients(reference.jsd, [s, t], upstream, beta=beta)[0]
        assert (leaf.grad - right).norm() <= 3e-3 * right.norm()
    for reverse in (False, True):
        value = vk.kl_div(s, t, reverse=reverse)
        truth = reference.kl_div(s, t, reverse=reverse)
        assert ((value - truth).abs() <= 1e-6 + 1e-6 * truth).all()


# the second is cut into the most segments that there are
@pytest.mark.parametrize("width", [75_968, 262_144])
def test_nothing_of_the_logits_size_is_allocated(call, width, device):
    rows = 512
    s, t = sides(rows, width, device, torch.bfloat16)
    index = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    leaves = [x.requires_grad_() for x in (s, t)][: call.sides]
    for _ in range(2):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        values = call(*leaves, index=index)
        # by itself: gradients are larger than whatever a forward could hide behind them
        forward = torch.accelerator.max_memory_allocated() - before
        grads = torch.autograd.grad([v.sum() for v in values], leaves)
        both = torch.accelerator.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        del values, grads
    assert forward <= rows * 64 * 4 + 64 * 512
    assert both <= rows * 64 * 4 + 64 * 512


class OneRank:
    """An exchange that reduces in place, as one over a process group does."""

    def gather(self, x):
        return x.unsqueeze(0)

    def sum(self, x):
        return x


@pytest.mark.parametrize("number", [1, 2, 256, 1024])
@pytest.mark.parametrize("op", [vk.logprobs, vk.logprobs_and_entropy])
@pytest.mark.parametrize("sharded", [False, True])
def test_ids_cost_no_memory_of_their_own(op, number, sharded, device):
    # whole megabytes, of which the allocator counts no more than was asked for
    rows, width = 512, 20_480
    leaf = sides(rows, width, device, torch.bfloat16)[0].requires_grad_()
    index = torch.randint(0, width, (4, rows // 4 + 1, number), device=device)[:, 1:]
    up = torch.randn(rows, number, device=device).view(index.shape)
    exchange = {"exchange": OneRank()} if sharded else {}
    for _ in range(2):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        values = op(leaf.view(4, -1, width), index, **exchange)
        values = values if isinstance(values, tuple) else (values,)
        out = sum(v.nbytes for v in values)
        forward = torch.accelerator.max_memory_allocated() - before - out
        upstream = (up, torch.ones_like(up[..., 0]))[: len(values)]
        (grad,) = torch.autograd.grad(values, leaf, upstream)
        both = torch.accelerator.max_memory_allocated() - before - out - grad.nbytes
        del values, grad
    assert max(forward, both) <= rows * 64 * 4 + 64 * 512


def test_tensors_of_another_device_than_the_current_one(call, device):
    """The last device's, while the first is the current one; two where there are two."""
    g = torch.Generator().manual_seed(0)
    s, t = (torch.randn(6, 5_001, generator=g).bfloat16() for _ in range(2))
    index = torch.randint(0, 5_000, (6, 2), generator=g)
    count = torch.accelerator.device_count()
    with torch.accelerator.device_index(0):
        for backend in ("triton", "eager"):
            found = []
            for number in (0, count - 1):
                there = torch.device(device.type, number)
                ids = index.to(there)
                with vk.backend(backend):
                    found.append(run(call, s.to(there), t.to(there), ids))
                    assert all(x.device == there for x in found[-1])
                    vk.check_ids()
                    x = s.to(there).requires_grad_()
                    ids[3, 1] = 5_001
                    lp = vk.logprobs(x, ids)
                    with pytest.raises(ValueError, match=r"got 5001 at position \[3\]"):
                        call(x, x, index=index.to(there))
                    (grad,) = torch.autograd.grad(lp.sum(), x)
                assert lp.isnan().any(1).tolist() == [row == 3 for row in range(6)]
                assert grad.isnan().any(1).tolist() == [row == 3 for row in range(6)]
                assert torch.accelerator.current_device_index() == 0
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))


def test_many_ids(device):
    s, _ = sides(4, 50_000, device, torch.bfloat16)
    index = torch.randint(0, 50_000, (4, 1024), device=device)
    index[:, 100:200] = index[:, :1]
    index[1, ::2] = -100
    up = torch.randn(4, 1024, device=device)
    leaf = s.clone().requires_grad_()
    vk.logprobs(leaf, index).backward(up)
    (right,) = reference.gradients(reference.logprobs, [s], [up], index=index)
    torch.testing.assert_close(leaf.grad.double(), right, rtol=2.0**-8, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("number", [2, 40, 256, 700, 1100])
@pytest.mark.parametrize("op", [vk.logprobs, vk.logprobs_and_entropy])
def test_a_row_with_many_ids_has_the_same_bits_in_any_company(op, number, dtype, device):
    """Whichever of a column's ids was the last to be written."""
    rows, width = 2_000, 5_001
    s, _ = sides(rows, width, device, dtype)
    index = torch.randint(0, 600, (rows, number), device=device)
    index[:, 1::7] = -100
    up = torch.randn(rows, number, device=device), torch.randn(rows, device=device)

    def of(some):
        leaf = s[some].clone().requires_grad_()
        out = op(leaf, index[some], temperature=1.3)
        out = out if isinstance(out, tuple) else (out,)
        return (*out, *torch.autograd.grad(out, leaf, [x[some] for x in up[: len(out)]]))

    many = of(slice(None))
    for some in (slice(3, 4), slice(100, 200), slice(None, None, 2)):
        for one, all_ in zip(of(some), many, strict=True):
            assert torch.equal(one, all_[some])
