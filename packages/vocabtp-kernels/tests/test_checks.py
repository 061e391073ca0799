"""What a caller can get wrong is one line that names the function, the rule and what came."""

import inspect

import numpy as np
import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import ops, reference

X = torch.zeros(2, 3)
IDS = torch.zeros(2, dtype=torch.int64)
CALLS = {
    "logprobs": lambda x=X, **o: vk.logprobs(x, IDS, **o),
    "entropy": lambda x=X, **o: vk.entropy(x, **o),
    "logprobs_and_entropy": lambda x=X, **o: vk.logprobs_and_entropy(x, IDS, **o),
    "kl_div": lambda x=X, **o: vk.kl_div(x, X, **o),
    "jsd": lambda x=X, **o: vk.jsd(x, X, **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_logits_of_the_wrong_kind(name):
    for bad in ([[0.0]], 1.0, None, np.zeros((2, 3))):
        with pytest.raises(TypeError, match=rf"^{name}: \w*logits must be a tensor, got"):
            CALLS[name](bad)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=rf"^{name}: \w*logits must be bfloat16.*got {dtype}"):
            CALLS[name](torch.zeros(2, 3).to(dtype))
    with pytest.raises(ValueError, match=rf"^{name}: \w*logits must be \[\.\.\., vocabulary\]"):
        CALLS[name](torch.tensor(1.0))


@pytest.mark.parametrize("name", ["entropy", "logprobs", "kl_div", "jsd"])
def test_logits_without_numbers(name):
    x = torch.zeros(2, 3, device="meta")
    more = {"entropy": [], "logprobs": [IDS.to("meta")]}.get(name, [x])
    with pytest.raises(TypeError, match=rf"^{name}: \w*logits must have numbers.* meta device"):
        getattr(vk, name)(x, *more)


@pytest.mark.parametrize("name", CALLS)
def test_temperature(name):
    for bad in (True, None, "1", torch.tensor(1.0), [1.0]):
        with pytest.raises(TypeError, match=rf"^{name}: temperature must be a number, got"):
            CALLS[name](temperature=bad)
    for bad in (0, 0.0, -1, -0.5, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=rf"^{name}: temperature must be finite and > 0, got"):
            CALLS[name](temperature=bad)
    for good in (2, 0.5, np.float64(1.5), np.float32(1.5), np.int64(2)):
        CALLS[name](temperature=good)


@pytest.mark.parametrize("name", CALLS)
def test_numbers_beyond_the_machine(name):
    with pytest.raises(ValueError, match=rf"^{name}: temperature must be a number that a float"):
        CALLS[name](temperature=10**400)
    if name.startswith("logprobs"):
        for option in ("ignore_index", "vocab_start", "vocab_size"):
            for bad in (2**63, -(2**63) - 1):
                with pytest.raises(ValueError, match=rf"^{name}: {option} must be an integer of"):
                    CALLS[name](**{option: bad})


@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_one_shape(name):
    with pytest.raises(TypeError, match=rf"^{name}: \w*logits must be a dense tensor, got"):
        CALLS[name](X.to_sparse())
    with pytest.raises(TypeError, match=rf"^{name}: \w*logits must be a dense tensor, got a nes"):
        CALLS[name](torch.nested.nested_tensor([[1.0], [1.0, 2.0]], layout=torch.jagged))


@pytest.mark.parametrize("name", ["kl_div", "jsd"])
def test_pairs_that_do_not_fit(name):
    op = getattr(vk, name)
    for student, teacher in (
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2, 3), torch.zeros(1, 3)),
        (torch.zeros(2, 3), torch.zeros(3)),
        (torch.zeros(0, 3), torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: student and teacher must share a shape"):
            op(student, teacher)
    with pytest.raises(ValueError, match=rf"^{name}: student and teacher must be on one device"):
        op(torch.zeros(2, 3), torch.zeros(2, 3, device="meta"))
    with pytest.raises(TypeError, match=rf"^{name}: teacher_logits must be bfloat16"):
        op(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32))


@pytest.mark.parametrize("name", ["kl_div", "jsd"])
def test_pointwise_clip(name):
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"^{name}: pointwise_clip must be finite and > 0"):
            CALLS[name](pointwise_clip=bad)
    for bad in (True, torch.tensor(0.1), "0.1"):
        with pytest.raises(TypeError, match=rf"^{name}: pointwise_clip must be a number"):
            CALLS[name](pointwise_clip=bad)


def test_beta_and_flags():
    for bad in (-1e-9, 1.0000001, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^jsd: beta must be in \[0, 1\], got"):
            vk.jsd(X, X, beta=bad)
    for bad in (True, False, None, torch.tensor(0.5)):
        with pytest.raises(TypeError, match=r"^jsd: beta must be a number"):
            vk.jsd(X, X, beta=bad)
    for bad in (1, None, 0.5):
        with pytest.raises(TypeError, match=r"^kl_div: reverse must be True or False"):
            vk.kl_div(X, X, reverse=bad)
        with pytest.raises(TypeError, match=r"^jsd: rescale must be True or False"):
            vk.jsd(X, X, rescale=bad)


def test_options_are_keyword_only():
    # a DeepSpeed call with positional options must not choose something else here
    for call in (
        lambda: vk.kl_div(X, X, True),
        lambda: vk.jsd(X, X, 0.5),
        lambda: vk.logprobs(X, IDS, -100),
        lambda: vk.entropy(X, 1.0),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


def test_the_reference_takes_the_same_arguments():
    sharded = {"exchange", "vocab_start", "vocab_size", "validate_ids", "caller"}
    for name in CALLS:
        mine = inspect.signature(getattr(ops, name)).parameters
        dense = inspect.signature(getattr(reference, name)).parameters
        assert [p for p in mine if p not in sharded] == list(dense)
        for parameter in dense.values():
            assert mine[parameter.name].default == parameter.default
            assert mine[parameter.name].kind == parameter.kind
