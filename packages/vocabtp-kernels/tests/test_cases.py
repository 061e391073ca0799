"""Faults that users of comparable software reported, as inputs with known answers."""

import math

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference
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


V = 100_000


@pytest.mark.parametrize("bounds", [[(0, V)], [(0, 40_000), (40_000, V)], [(0, 0), (0, V)]])
def test_leading_tiles_without_support(bounds):
    x = torch.full((5, V), -INF)
    x[0, 0] = x[1, 50_000] = x[2, V - 1] = 10.0
    x[3, 70_000:70_004] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    ids = torch.tensor([0, 50_000, V - 1, 70_003, 3])
    lp, (grad,) = sharded(vk.logprobs, [x], bounds, torch.ones(5), index=ids)
    close(lp[:4], [0.0, 0.0, 0.0, -0.440190])
    assert lp[4].isnan()
    close(grad[3, 70_000:70_004], [-0.0321, -0.0871, -0.2369, 0.3561], 1e-4)
    assert (grad[4] == 0).all()
    assert grad.isfinite().all()
    h, (grad,) = sharded(vk.entropy, [x], bounds, torch.ones(5))
    close(h[:4], [0.0, 0.0, 0.0, 0.947537])
    assert h[4].isnan()
    assert (grad[4] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("bounds", [[(0, V)], [(0, 40_000), (40_000, V)]])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_row_against_itself_without_leading_support(bounds, clip):
    x = torch.full((4, V), -INF)
    x[0, 0] = x[1, V - 1] = 10.0
    x[2, 70_000:70_004] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    up = torch.ones(4)
    for op, options in (
        (vk.kl_div, {"reverse": False}),
        (vk.kl_div, {"reverse": True}),
        (vk.jsd, {"beta": 0.5}),
        (vk.jsd, {"beta": 0.99, "rescale": True}),
    ):
        value, grads = sharded(op, [x, x], bounds, up, pointwise_clip=clip, **options)
        assert (value[:3] == 0).all()
        assert value[3].isnan()
        for grad in grads:
            close(grad, torch.zeros_like(grad), 1e-7)
            assert (grad[3] == 0).all()


@pytest.mark.parametrize("bounds", WHOLE_AND_SHARDS)
@pytest.mark.parametrize(
    ("op", "options", "masked"),
    [
        (vk.kl_div, {"reverse": True}, 1),
        (vk.jsd, {"beta": 1.0}, 1),
        (vk.kl_div, {"reverse": False}, 0),
        (vk.jsd, {"beta": 0.0}, 0),
    ],
)
def test_masked_out_row_with_infinite_kl(op, options, masked, bounds):
    # the side that must support everything is the one with a masked token in row 0
    supports = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    misses = torch.tensor([[0.0, -INF, 2.0], [0.0, 0.5, 2.0]])
    sides = [supports, misses] if masked else [misses, supports]
    value, grads = sharded(op, sides, bounds, torch.tensor([0.0, 1.0]), **options)
    assert value[0] == INF
    close(value[1], 0.021114)
    for grad in grads:
        assert (grad[0] == 0).all()
    close(grads[1 - masked][1], [-0.0110, 0.0924, -0.0814], 1e-4)
    # and as a loss: what is masked in place or by where has no gradient
    leaf = [side.clone().requires_grad_() for side in sides]
    loss = op(*leaf, **options)
    loss[torch.tensor([True, False])] = 0.0
    loss.sum().backward()
    close(leaf[1 - masked].grad[1], [-0.0110, 0.0924, -0.0814], 1e-4)
    assert (leaf[0].grad[0] == 0).all()
    assert (leaf[1].grad[0] == 0).all()


@pytest.mark.parametrize("bounds", WHOLE_AND_SHARDS)
def test_infinite_kl_with_a_gradient(bounds):
    a = torch.tensor([[0.0, 1.0, 2.0]])
    b = torch.tensor([[0.0, -INF, 2.0]])
    value, (grad_a, grad_b) = sharded(vk.kl_div, [a, b], bounds, torch.ones(1), reverse=True)
    assert value[0] == INF
    assert not grad_a.isfinite().any()
    close(grad_b, b.softmax(-1) - a.softmax(-1))
    # the cap makes the same row finite, and a capped term has no gradient of its own
    value, (grad_a, grad_b) = sharded(
        vk.kl_div, [a, b], bounds, torch.ones(1), reverse=True, pointwise_clip=0.3
    )
    p, q = a.softmax(-1)[0], b.softmax(-1)[0]
    live = p[[0, 2]] * (p / q).log()[[0, 2]]
    close(value, [float(live.clamp(max=0.3).sum() + 0.3)])
    f = torch.tensor([(p / q).log()[0] + 1, 0.0, (p / q).log()[2] + 1])
    close(grad_a[0], p * (f - (p * f).sum()))
    close(grad_b[0], q * (p[0] + p[2]) - p * torch.tensor([1.0, 0.0, 1.0]))


def test_support_is_decided_on_the_logits():
    # a's probability of the masked token underflows in fp32 and fp64; it is supported all the same
    a, b = torch.tensor([[0.0, -5000.0]]), torch.tensor([[0.0, -INF]])
    assert vk.kl_div(a, b, reverse=True).item() == INF
    assert vk.kl_div(b, a, reverse=True).item() == 0.0
    assert vk.kl_div(a.double(), b.double(), reverse=True).item() == INF
    assert vk.kl_div(a, b, reverse=True, pointwise_clip=0.5).item() == 0.5


def test_nan_wins_over_an_infinite_kl():
    a = torch.tensor([[0.0, 1.0, float("nan")], [0.0, 1.0, INF], [0.0, 1.0, 2.0]])
    b = torch.tensor([[0.0, -INF, 0.0], [0.0, -INF, 0.0], [-INF, -INF, -INF]])
    for bounds in WHOLE_AND_SHARDS:
        value, grads = sharded(vk.kl_div, [a, b], bounds, torch.ones(3), reverse=True)
        assert value.isnan().all()
        for grad in grads:
            assert grad[:2].isnan().all()
            assert (grad[2] == 0).all()


def test_jsd_of_distant_sides_and_its_ends():
    s, t = torch.tensor([[-8.0, 8.0]]), torch.tensor([[8.0, -8.0]])
    close(vk.jsd(s, t, beta=0.5), [0.693145])
    close(vk.jsd(s, t, beta=1.0), [15.999996])
    for beta, reverse in ((1.0, True), (0.0, False), (1, True), (0, False)):
        for clip in (None, 0.2):
            options = {"pointwise_clip": clip, "temperature": 2.0}
            one = [x.clone().requires_grad_() for x in (s, t)]
            two = [x.clone().requires_grad_() for x in (s, t)]
            end = vk.jsd(*one, beta=beta, rescale=True, **options)
            kl = vk.kl_div(*two, reverse=reverse, **options)
            assert torch.equal(end, kl)
            end.sum().backward()
            kl.sum().backward()
            assert torch.equal(one[0].grad, two[0].grad)
            assert torch.equal(one[1].grad, two[1].grad)
    for beta in (1.5, -1e-9, float("nan"), INF):
        with pytest.raises(ValueError, match=r"jsd: beta must be in \[0, 1\]"):
            vk.jsd(s, t, beta=beta)


def test_jsd_of_disjoint_supports_is_at_its_bound():
    s, t = torch.tensor([[0.0, -INF, 1.0, -INF]]), torch.tensor([[-INF, 2.0, -INF, 0.0]])
    for beta in (0.5, 0.1, 1 - 1e-9):
        bound = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
        value, grads = sharded(vk.jsd, [s, t], [(0, 2), (2, 4)], torch.ones(1), beta=beta)
        assert abs(value.item() - bound) <= 1e-6 * bound
        for grad in grads:
            close(grad, torch.zeros(1, 4), 1e-6)


def test_low_precision_teacher_and_a_temperature():
    g = torch.Generator().manual_seed(8)
    t = (torch.randn(64, 151, generator=g) * 6).bfloat16()
    s = t.float() + 0.02 * torch.randn(64, 151, generator=g)
    value = vk.jsd(s, t, beta=0.5, temperature=1.3)
    assert abs(value.mean().item() - 1.62e-5) < 1e-7
    assert (value >= -1e-7).all()
    for op, options in ((vk.jsd, {}), (vk.kl_div, {"reverse": True}), (vk.kl_div, {})):
        value = op(s, t, temperature=1.3, **options)
        assert torch.equal(value, op(s, t.float(), temperature=1.3, **options))
        close(value, getattr(reference, op.__name__)(s, t, temperature=1.3, **options))


def test_view_of_a_padded_vocabulary():
    for pad in (float("nan"), INF):
        buf = torch.full((3, 8), pad)
        buf[:, :5] = torch.arange(15.0).view(3, 5) % 4
        buf.requires_grad_()
        h = vk.entropy(buf[:, :5])
        close(h, [1.0565, 1.1507, 1.2545], 1e-4)
        other = buf.detach()[:, :5].flip(-1)
        lp = vk.logprobs(buf[:, :5], torch.tensor([0, 1, 2]))
        kl = vk.kl_div(buf[:, :5], other, reverse=True) + vk.kl_div(other, buf[:, :5])
        total = h + lp + kl + vk.jsd(other, buf[:, :5])
        total.sum().backward()
        assert total.isfinite().all()
        assert (buf.grad[:, 5:] == 0).all()
        assert buf.grad[:, :5].isfinite().all()


@pytest.mark.parametrize("entropy_first", [False, True])
def test_shared_logits_are_never_written(entropy_first):
    z = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 3.0]], requires_grad=True)
    before, version = z.detach().clone(), z._version
    ids = torch.tensor([2, 0])
    if entropy_first:
        h, lp = vk.entropy(z), vk.logprobs(z, ids)
    else:
        lp, h = vk.logprobs(z, ids), vk.entropy(z)
    close(lp, [-0.1698, -3.0949], 1e-4)
    close(h, [0.5243, 0.3666], 1e-4)
    (lp.sum() + 0.1 * h.sum()).backward()
    assert torch.equal(z, before)
    assert z._version == version
    truth = reference.gradients(
        reference.logprobs_and_entropy, [z], [torch.ones(2), torch.full((2,), 0.1)], index=ids
    )
    close(z.grad, truth[0])


def test_temperature_scales_both_sides():
    s, t = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    close(vk.kl_div(s, t, reverse=True, temperature=2.0), [0.220514])
    close(4 * vk.kl_div(s, t, reverse=True, temperature=2), [0.882058])
    assert abs(vk.kl_div(s / 2, t, reverse=True).item() - 0.508287) < 1e-6
    for temperature in (0.0, -1.0, float("nan"), INF):
        with pytest.raises(ValueError, match="temperature must be finite and > 0"):
            vk.kl_div(s, t, temperature=temperature)


def test_shard_without_columns():
    x = torch.tensor([[0.0, 1.0, 2.0]])
    for bounds in ([(0, 3), (3, 3)], [(0, 0), (0, 3)], [(0, 1), (1, 1), (1, 3)]):
        for dtype in (torch.float32, torch.bfloat16):
            logits, up = x.to(dtype), torch.ones(1)
            h, (grad,) = sharded(vk.entropy, [logits], bounds, up)
            close(h, [0.832396])
            assert grad.shape == (1, 3)
            sides = [logits, logits.flip(-1)]
            close(sharded(vk.kl_div, sides, bounds, up)[0], [1.150421])
            for options in ({"reverse": True}, {"pointwise_clip": 10.0}):
                close(sharded(vk.kl_div, sides, bounds, up, **options)[0], [1.150421])
            right = reference.jsd(*sides)
            close(sharded(vk.jsd, sides, bounds, up)[0], right)
            lp = sharded(vk.logprobs, [logits], bounds, up, index=torch.tensor([1]))[0]
            close(lp, [-1.407606])


def test_shards_without_rows(call):
    for bounds in ([(0, 3)], [(0, 2), (2, 3)], [(0, 0), (0, 3)]):

        def rank(exchange, start, end, bounds=bounds):
            leaves = [torch.zeros(0, end - start, requires_grad=True) for _ in range(2)]
            leaves = leaves[: call.sides]
            more = {"vocab_start": start, "vocab_size": 3} if call.takes_ids else {}
            index = torch.zeros(0, 2, dtype=torch.int64)
            values = call(*leaves, index=index, exchange=exchange, **more)
            return values, torch.autograd.grad([v.sum() for v in values], leaves)

        for (values, grads), (start, end) in zip(run_sharded(rank, bounds), bounds, strict=True):
            assert values[0].shape[0] == 0
            assert all(g.shape == (0, end - start) for g in grads)
