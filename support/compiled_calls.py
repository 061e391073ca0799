"""Calls inside torch.compile beside the same ones outside, for the tests of it."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

ONE_OF_EACH = pytest.mark.parametrize(
    "call", ["logprobs", "entropy", "logprobs_and_entropy", "forward_kl_clip", "jsd"], indirect=True
)


def compiled(function, backend="aot_eager", **options):
    """The function compiled as one graph, and a counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def inputs(rows, dtype=torch.float32, vocabulary=11):
    """Two sides `[2, rows, vocabulary]` with a masked token and a row without any, and ids."""
    g = torch.Generator().manual_seed(rows)
    sides = torch.randn(2, 2, rows, vocabulary, generator=g)
    sides[:, :, :, 3] = -torch.inf
    if rows > 1:
        sides[0, 1, 1] = -torch.inf
    ids = torch.randint(0, vocabulary, (2, rows), generator=g)
    if rows > 2:
        ids[0, 2] = -100
    return sides.to(dtype), ids


def run(function, sides, needs=(True, True)):
    """Values and gradients; the upstream gradient of the first row is 0, of others 0.5 and up."""
    leaves = [x.detach().clone().requires_grad_(need) for x, need in zip(sides, needs, strict=True)]
    values = function(*leaves)
    upstream = [torch.arange(v.numel(), dtype=v.dtype).view(v.shape) / 2 for v in values]
    wanted = [x for x in leaves if x.requires_grad]
    return values, torch.autograd.grad(values, wanted, upstream, allow_unused=True)


def assert_same(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert len(ours) == len(theirs) > 0
        for x, y in zip(ours, theirs, strict=True):
            if x is None or y is None:
                assert x is y
                continue
            assert (x.dtype, x.shape, x.is_contiguous()) == (y.dtype, y.shape, y.is_contiguous())
            assert torch.equal(x.nan_to_num(nan=7.5), y.nan_to_num(nan=7.5))
            assert torch.equal(x.isnan(), y.isnan())
