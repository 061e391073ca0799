"""A row's bits do not depend on the other rows, on strides, on the dtype or on threads."""

import pytest
import torch

from vocabtp.kernels._eager import tiles

WIDTH = 1501


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    """Small enough for a batch to take several chunks, large enough for a chunk to be threaded."""
    monkeypatch.setattr(tiles, "_BUDGET_CPU", 4 << 20)


def bits(*tensors):
    return torch.cat([x.detach().double().reshape(-1) for x in tensors])


def run(call, s, t, index, upstream):
    """Values and gradients, each `[N, *]`, of logits as they lie in memory."""
    leaves = [s.detach().requires_grad_(), t.detach().requires_grad_()][: call.sides]
    values = call(*leaves, index=index, temperature=1.3)
    lead = upstream.view(s.shape[:-1])
    weights = [(lead if v.shape == lead.shape else lead[..., None]).expand_as(v) for v in values]
    return (*values, *torch.autograd.grad(values, leaves, weights))


@pytest.fixture(scope="module")
def rows():
    g = torch.Generator().manual_seed(3)
    s = torch.randn(100, WIDTH + 1, generator=g) * 4
    t = s + torch.randn(100, WIDTH + 1, generator=g)
    s[:, 7], t[:, 7] = -float("inf"), -float("inf")
    index = torch.randint(0, WIDTH, (100, 2), generator=g)
    return s, t, index, torch.randn(100, generator=g)


@pytest.mark.parametrize("count", [1, 2])
def test_row_has_the_same_bits_in_any_company(call, rows, threads, count):
    threads(count)
    s, t, index, upstream = rows
    # strided: rows one element longer than what is read
    batch = run(call, s[:, :-1], t[:, :-1], index, upstream)
    # other neighbours, another place in the batch, other chunks
    some = run(call, s[47:, :-1], t[47:, :-1], index[47:], upstream[47:])
    for one, many in zip(some, batch, strict=True):
        assert torch.equal(bits(one), bits(many[47:]))
    for at in (0, 49, 99):
        here = slice(at, at + 1)
        alone = run(call, s[here, :-1].clone(), t[here, :-1].clone(), index[here], upstream[here])
        for one, many in zip(alone, batch, strict=True):
            assert torch.equal(bits(one[0]), bits(many[at]))


def test_a_wide_row_has_the_same_bits_alone_with_threads(call, threads):
    # wide enough for torch to split a single row's reduction among threads, were it to do it
    g = torch.Generator().manual_seed(4)
    s, t = torch.randn(3, 70_001, generator=g) * 4, torch.randn(3, 70_001, generator=g) * 4
    index = torch.randint(0, 70_001, (3, 2), generator=g)
    threads(2)
    batch = run(call, s, t, index, torch.ones(3))
    alone = run(call, s[1:2], t[1:2], index[1:2], torch.ones(1))
    threads(1)
    single = run(call, s[1:2], t[1:2], index[1:2], torch.ones(1))
    for one, other, many in zip(alone, single, batch, strict=True):
        assert torch.equal(bits(one[0]), bits(many[1]))
        assert torch.equal(bits(one[0]), bits(other[0]))


def test_threads_change_nothing(call, rows, threads):
    s, t, index, upstream = rows
    threads(1)
    one = run(call, s, t, index, upstream)
    threads(2)
    two = run(call, s, t, index, upstream)
    assert torch.equal(bits(*one), bits(*two))


def test_layout_changes_nothing(call, rows):
    s, t, index, upstream = rows
    dense = run(call, s[:24, :-1].clone(), t[:24, :-1].clone(), index[:24], upstream[:24])
    # [4, 6] leading dimensions that are transposed in memory, on one side
    turned = s[:24].view(4, 6, -1).transpose(0, 1).contiguous().transpose(0, 1)[..., :-1]
    wide = t[:24].view(4, 6, -1)[..., :-1]
    other = run(call, turned, wide, index[:24].view(4, 6, 2), upstream[:24])
    assert torch.equal(bits(*dense), bits(*other))
    assert all(x.is_contiguous() for x in other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_has_the_values_of_the_same_numbers_in_fp32(call, rows, dtype):
    s, t, index, upstream = rows
    s, t = s[:9].to(dtype), t[:9].to(dtype)
    low = run(call, s, t, index[:9], upstream[:9])
    mixed = run(call, s.float(), t, index[:9], upstream[:9])
    full = run(call, s.float(), t.float(), index[:9], upstream[:9])
    values = 2 if call.name == "logprobs_and_entropy" else 1
    assert torch.equal(bits(*low[:values]), bits(*full[:values]))
    assert torch.equal(bits(*mixed[:values]), bits(*full[:values]))
    for grad, wide in zip(low[values:], full[values:], strict=True):
        assert grad.dtype == dtype
        assert torch.equal(grad, wide.to(dtype))


def test_torch_functions_do_not_depend_on_the_place_in_a_vector():
    # what the above rests on: the tail of a vectorised loop computes what its body does
    x = -torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 20
    for function in (torch.exp, torch.expm1, lambda v: torch.log1p(v / 21), lambda v: (-v).log()):
        whole = function(x)
        for start, size in ((1, 5), (3, 17), (7, 1), (13, 2001)):
            assert torch.equal(function(x[start : start + size]), whole[start : start + size])
