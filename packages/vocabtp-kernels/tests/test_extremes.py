"""Arguments at the ends of what a float holds, on both backends."""

import sys

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference
from vocabtp.kernels.testing import run_sharded

BACKENDS = ("eager", "triton")
CLIP = {"pointwise_clip": 0.1}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.3, 0.9, 1.0])
def test_a_finite_mask_is_none_at_a_low_temperature(name, dtype, temperature):
    # a padded vocabulary is masked with the lowest number: over T < 1 that is not finite
    low = torch.finfo(dtype).min
    a = torch.tensor([[0.0, 1.0, -120.0, -130.0, -150.0]]).to(dtype).requires_grad_()
    b = torch.tensor([[0.0, 1.0, low, low, low]]).to(dtype).requires_grad_()
    options = {"reverse": True, "temperature": temperature, **CLIP}
    with vk.backend(name):
        value = vk.kl_div(a, b, **options)
        grads = torch.autograd.grad(value.sum(), (a, b))
    right = reference.kl_div(a.detach().double(), b.detach().double(), **options)
    torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6)
    wanted = reference.gradients(
        reference.kl_div, [a.detach(), b.detach()], torch.ones(1, dtype=torch.float64), **options
    )
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want.double(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("op", [vk.kl_div, vk.jsd])
def test_a_clip_above_every_number_is_none(op, name):
    s, t = torch.randn(2, 3, 40)
    with vk.backend(name):
        for clip in (1e39, sys.float_info.max):
            one, other = (op(s, t, pointwise_clip=c) for c in (clip, None))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_temperature_that_is_taken_gives_numbers(call, name):
    s, t = torch.randn(2, 3, 40)
    s[:, 3], t[:, 3] = -float("inf"), -float("inf")
    index = torch.zeros(3, 1, dtype=torch.int64)
    with vk.backend(name):
        for temperature in (1e-37, 1e37):
            for value in call(s, t, index=index, temperature=temperature):
                assert not value.isnan().any()
    for bad in (1e-38, 5e-324, 1e38):
        with pytest.raises(ValueError, match=f"^{call.function}: temperature must be between"):
            call(s, t, index=index, temperature=bad)


@pytest.mark.parametrize("op", [vk.logprobs, vk.logprobs_and_entropy])
def test_columns_that_are_not_all_want_an_exchange(op):
    x, ids = torch.randn(3, 5), torch.tensor([7, 7, 2])
    with pytest.raises(ValueError, match=r"without an exchange .* got 5 columns of vocab_size 10"):
        op(x, ids, vocab_size=10)
    with pytest.raises(ValueError, match="without an exchange"):
        op(x, ids, vocab_start=5, vocab_size=10)
    op(x, ids.clamp(max=4), vocab_size=5)
    y = torch.randn(3, 5)
    run_sharded(
        lambda exchange, start, stop: op(
            (x, y)[start > 0], ids, vocab_start=start, vocab_size=10, exchange=exchange
        ),
        [(0, 5), (5, 10)],
    )
