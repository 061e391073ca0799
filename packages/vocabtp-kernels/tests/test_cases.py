"""Faults that users of comparable software reported, as inputs with known answers."""

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels.testing import run_sharded

INF = float("inf")
WHOLE_AND_SHARDS = [[(0, 3)], [(0, 2), (2, 3)], [(0, 0), (0, 2), (2, 2), (2, 3)]]


def close(actual, expected, tol=2e-6):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, atol=tol, rtol=tol)


def sharded(op, logits, bounds, upstream, **options):
    """Values of the first rank, checked equal on all, and the gradients of all shards."""

    def rank(exchange, start, end):
        leaves = [x[:, start:end].clone().requires_grad_() for x in logits]
        more = {"vocab_start": start, "vocab_size": bounds[-1][1]} if "index" in options else {}
        values = op(*leaves, exchange=exchange, **options, **more)
        return values.detach(), torch.autograd.grad(values, leaves, upstream)

    results = run_sharded(rank, bounds)
    for values, _ in results:
        assert torch.equal(values.nan_to_num(nan=-7.0), results[0][0].nan_to_num(nan=-7.0))
    return results[0][0], [
        torch.cat(grads, 1) for grads in zip(*[r[1] for r in results], strict=True)
    ]


@pytest.mark.parametrize("bounds", WHOLE_AND_SHARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_entropy_with_masked_tokens(dtype, bounds):
    x = torch.tensor([[0.0, 1.0, -INF], [0.0, 0.0, -INF], [65504.0, -65504.0, -65504.0]]).to(dtype)
    h, (grad,) = sharded(
        vk.entropy, [x], bounds, torch.ones(3, dtype=torch.promote_types(dtype, torch.float32))
    )
    close(h, [0.582203, 0.693147, 0.0])
    close(
        grad,
        [[0.196612, -0.196612, 0], [0, 0, 0], [0, 0, 0]],
        1e-3 if dtype == torch.float16 else 2e-6,
    )
