import torch
import torch.distributed as dist

import vocabtp.dist as vd
from vocabtp.dist.testing import layouts, piece


def _gather(rank, world):
    g = torch.Generator().manual_seed(6)
    whole = torch.randn(2, 5, 7, generator=g)
    whole[0, 0, 0], whole[0, 1, 6], whole[1, 1] = float("nan"), -0.0, -torch.inf
    weight = torch.randn(2, 5, 7, generator=g)
    for name, bounds in layouts(7, world).items():
        shard = vd.VocabShard(*bounds[rank], 7, dist.group.WORLD)
        own = slice(*bounds[rank])
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            local = piece(whole.to(dtype), bounds[rank], requires_grad=True)
            full = vd.gather_vocab(local, shard)
            assert full.dtype == dtype
            assert torch.equal(full.view(torch.uint8), whole.to(dtype).view(torch.uint8)), name
            (full * weight.to(dtype)).nansum().backward()
            right = weight.to(dtype).masked_fill(whole.to(dtype).isnan(), 0)[..., own]
            assert torch.equal(local.grad, right), name
            assert local.grad.is_contiguous()
        # a strided view, zero rows
        wide = torch.zeros(5, 2, shard.width + 2)
        wide[..., 1:-1] = whole.transpose(0, 1)[..., own]
        view = wide[..., 1:-1].transpose(0, 1).requires_grad_()
        assert torch.equal(vd.gather_vocab(view, shard).nan_to_num(), whole.nan_to_num())
        none = piece(whole[:0], bounds[rank], requires_grad=True)
        full = vd.gather_vocab(none, shard)
        assert full.shape == (0, 5, 7)
        full.sum().backward()
        assert none.grad.shape == none.shape
        # the route's point: dense losses on it equal the sharded ones, gradients too
        a = piece(whole[1, 2:], bounds[rank], requires_grad=True)
        dense = torch.log_softmax(vd.gather_vocab(a, shard), -1)
        entropy = -(dense.exp() * dense).sum(-1)
        (grad,) = torch.autograd.grad(entropy.sum(), [a])
        value = vd.vocab_parallel_entropy(a, shard=shard)
        torch.testing.assert_close(value, entropy.detach(), atol=1e-6, rtol=1e-6)
        (other,) = torch.autograd.grad(value.sum(), [a])
        torch.testing.assert_close(grad, other, atol=1e-6, rtol=1e-6)
    return True


def test_gather_is_whole_and_its_gradient_local(ranks):
    assert ranks(_gather, 3) == [True] * 3
