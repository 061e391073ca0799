"""Errors against fp64 at the size of a real vocabulary, where fp32 has least to give."""

import math

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference
from vocabtp.kernels.testing import run_sharded

V = 151_936
WHOLE = [(0, V)]
SHARDS = [(0, 37_984), (37_984, 37_984), (37_984, 100_000), (100_000, V)]


def near(kind, difference):
    """A student and a teacher whose logits differ by normal noise of this size."""
    g = torch.Generator().manual_seed(int(-math.log10(difference)))
    s = torch.randn(2, V, generator=g) * 3
    if kind == "peaked":  # two tokens hold everything
        s -= 60
        s[:, 5], s[:, 99_000] = 20.0, 20.1
    return s, s + difference * torch.randn(2, V, generator=g)


@pytest.mark.parametrize("bounds", [WHOLE, SHARDS], ids=["whole", "shards"])
@pytest.mark.parametrize("difference", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("kind", ["normal", "peaked"])
def test_nearly_equal_sides(kind, difference, bounds):
    s, t = near(kind, difference)
    for beta in (0.1, 0.5, 0.9):
        truth = reference.jsd(s, t, beta=beta)

        def jsd(exchange, a, b, beta=beta):
            return vk.jsd(s[:, a:b], t[:, a:b], beta=beta, exchange=exchange)

        for value in run_sharded(jsd, bounds):
            assert ((value - truth).abs() <= 1e-3 * truth).all()
    for reverse in (False, True):
        truth = reference.kl_div(s, t, reverse=reverse)

        def kl(exchange, a, b, reverse=reverse):
            return vk.kl_div(s[:, a:b], t[:, a:b], reverse=reverse, exchange=exchange)

        for value in run_sharded(kl, bounds):
            assert ((value - truth).abs() <= 1e-6).all()


def test_nearly_equal_sides_have_accurate_gradients():
    s, t = near("normal", 1e-4)
    for op, options in (
        ("kl_div", {"reverse": True}),
        ("kl_div", {"reverse": False}),
        ("jsd", {"beta": 0.5}),
    ):
        leaves = [s.clone().requires_grad_(), t.clone().requires_grad_()]
        getattr(vk, op)(*leaves, **options).sum().backward()
        truth = reference.gradients(getattr(reference, op), [s, t], [torch.ones(2)], **options)
        for leaf, right in zip(leaves, truth, strict=True):
            assert (leaf.grad - right).norm() <= 2e-3 * right.norm()


@pytest.mark.parametrize("difference", [1e-4, 1e-2, 1.0])
def test_rescaled_jsd_runs_into_both_kls(difference):
    s, t = near("normal", difference)
    p, q = s.double().log_softmax(-1), t.double().log_softmax(-1)
    for beta in (1e-12, 1e-6, 1 - 1e-6, 1 - 1e-12):
        # the mixture's own form in fp64 has no digits left here
        log_mp = torch.log1p(beta * torch.expm1(q - p))
        log_mq = torch.log1p((1 - beta) * torch.expm1(p - q))
        truth = -(q.exp() * log_mq / (1 - beta) + p.exp() * log_mp / beta).sum(-1)
        value = vk.jsd(s, t, beta=beta, rescale=True)
        assert ((value - truth).abs() <= 1e-3 * truth.abs()).all()
        end = reference.kl_div(s, t, reverse=beta > 0.5)
        assert ((value - end).abs() <= 1e-3 * end).all()


@pytest.mark.parametrize("beta", [1e-300, 1e-40, 2.0**-100])
def test_rescaled_jsd_stays_a_kl_below_the_range_of_fp32(beta):
    s, t = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    leaf = s.clone().requires_grad_()
    value = vk.jsd(leaf, t, beta=beta, rescale=True)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), vk.kl_div(s, t), rtol=1e-6, atol=0)
    right = s.softmax(-1) - t.softmax(-1)
    torch.testing.assert_close(leaf.grad, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shift", [(1e4, 1e4), (-1e4, 1e4), (3e4, -3e4)])
def test_common_offsets_change_nothing(call, shift):
    # multiples of 1/64 stay exact under the offset, so nothing at all may change
    g = torch.Generator().manual_seed(5)
    s, t = ((torch.randn(4, 1000, generator=g) * 3 * 64).round() / 64 for _ in range(2))
    index = torch.randint(0, 1000, (4,), generator=g)
    results = []
    for a, b in ((0.0, 0.0), shift):
        leaves = [(s + a).requires_grad_(), (t + b).requires_grad_()][: call.sides]
        values = call(*leaves, index=index, temperature=0.7)
        results.append((*values, *torch.autograd.grad([v.sum() for v in values], leaves)))
    for plain, moved in zip(*results, strict=True):
        assert torch.equal(plain, moved)


def test_wide_vocabulary_keeps_the_digits_of_a_sum():
    # equal logits: H = log V and every log p = -log V; a running fp32 sum is off in the 4th digit
    x = torch.zeros(2, 2_000_003)
    lp, h = vk.logprobs_and_entropy(x, torch.tensor([0, 2_000_002]))
    right = math.log(2_000_003)
    assert (h.double() - right).abs().max() < 2e-6
    assert (lp.double() + right).abs().max() < 2e-6
