"""Faults that users of comparable software reported, on shards, with their siblings."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
from tp_places import at
from vocabtp.dist.testing import check_op, layouts, ops, piece

INF = float("inf")


def close(actual, expected, tol=2e-6):
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    torch.testing.assert_close(actual.detach(), expected, atol=tol, rtol=tol)


def _calls(a, b, ids, **group):
    """Every loss on local logits of a student and a teacher: name -> value."""
    lp = vd.vocab_parallel_logprobs
    both = vd.vocab_parallel_logprobs_and_entropy
    kl, jsd = vd.vocab_parallel_kl_div, vd.vocab_parallel_jsd
    return {
        "logprobs": lambda: lp(a, ids, **group),
        "entropy": lambda: vd.vocab_parallel_entropy(a, **group),
        "both": lambda: sum(x.sum() for x in both(a, ids, **group)),
        "forward": lambda: kl(a, b, **group),
        "reverse": lambda: kl(a, b, reverse=True, **group),
        "clipped": lambda: kl(a, b, pointwise_clip=0.1, **group),
        "jsd": lambda: jsd(a, b, **group),
        "jsd 0": lambda: jsd(a, b, beta=0.0, **group),
        "jsd 1": lambda: jsd(a, b, beta=1.0, **group),
    }


def _owner_of_the_token(rank, world, place):
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=place.device)
    local = x[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
    ids = torch.tensor([3], device=place.device)
    value = vd.vocab_parallel_logprobs(local, ids, tp_group=dist.group.WORLD)
    value.sum().backward()
    return value.detach().cpu(), local.grad.cpu()


@at(eager=[2], interpreted=[2])
def test_b18_every_shard_gets_its_gradient_once(tp):
    grads = [[[-0.0321, -0.0871]], [[-0.2369, 0.3561]]]
    for rank, (value, grad) in enumerate(tp(_owner_of_the_token)):
        close(value, [-0.440190])
        close(grad, grads[rank], 1e-4)


def _empty_shards(rank, world, place):
    """B21 at every layout that has an empty shard, with zero rows, bf16, and all ops."""
    G = dist.group.WORLD
    x = torch.tensor([[0.0, 1.0, 2.0]], device=place.device)
    every = list(layouts(3, world).items())
    if place.interpreted:
        every = every[1 : 4 if world == 2 else None : world - 1]
    for turn, (cut, bounds) in enumerate(every):
        a, b = bounds[rank]
        local = piece(x, (a, b), requires_grad=True)
        teacher = piece(x.flip(-1), (a, b))
        h = vd.vocab_parallel_entropy(local, tp_group=G)
        k = vd.vocab_parallel_kl_div(local, teacher, tp_group=G)
        lp = vd.vocab_parallel_logprobs(
            local,
            torch.tensor([1], device=place.device),
            tp_group=G,
            vocab_start_index=a,
            vocab_end_index=b,
            global_vocab_size=3,
        )
        close(h, [0.832396])
        close(k, [1.150421])
        close(lp, [-1.407606])
        (h + k + lp).sum().backward()
        assert local.grad.shape == (1, b - a), cut
        shard = vd.VocabShard(a, b, 3, G)
        for number, (title, op) in enumerate(ops().items()):
            for dtype in (torch.float32, torch.bfloat16):
                if place.interpreted and (turn + number) % 2 != (dtype is torch.bfloat16):
                    continue
                for rows in (1 if place.interpreted else 2, 0):
                    whole = [x.expand(rows, 3).to(dtype), x.flip(-1).expand(rows, 3).to(dtype)]
                    ids = torch.ones(rows, dtype=torch.int64, device=place.device)
                    n = 2 if "and_entropy" in title else 1
                    index = ids if op.takes_ids else None
                    if rows:
                        up = [torch.ones(rows, device=place.device)] * n
                        check_op(op, whole[: op.sides], (a, b), up, index=index, shard=shard)
                        continue
                    leaves = [piece(w, (a, b), requires_grad=True) for w in whole[: op.sides]]
                    args = leaves if index is None else [*leaves, ids]
                    values = op.sharded(*args, **op.options, tp_group=G)
                    values = values if isinstance(values, tuple) else (values,)
                    assert all(v.shape == (0,) and v.dtype == torch.float32 for v in values)
                    sum(v.sum() for v in values).backward()
                    assert all(leaf.grad.shape == (0, b - a) for leaf in leaves)
    return True


@at(eager=[2, 3])
def test_b21_an_empty_shard_is_as_if_the_rank_were_not_there(tp):
    assert tp(_empty_shards) == [True] * tp.world


@pytest.mark.parametrize("beta", [0.5, 1.0, 0.0])
def test_b11_the_mixture_is_of_probabilities(beta):
    s, t = torch.tensor([[-8.0, 8.0]]), torch.tensor([[8.0, -8.0]])
    value = vd.vocab_parallel_jsd(s, t, beta=beta)
    close(value, [0.693145 if beta == 0.5 else 15.999996])
    if beta != 0.5:
        assert torch.equal(value, vd.vocab_parallel_kl_div(s, t, reverse=beta == 1.0))
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"vocab_parallel_jsd: beta must be in \[0, 1\]"):
            vd.vocab_parallel_jsd(s, t, beta=bad)


def _small_cases(rank, world, place):
    """B11, B01, B04, B06, D7 on two shards; each rank has the right value and its own slice."""
    G = dist.group.WORLD

    def cut(x, at):
        """Own columns of x when rank 0 holds the first `at`."""
        x = x.to(place.device)
        bounds = [(0, at), (at, x.shape[-1])][rank]
        return piece(x, bounds, requires_grad=True), slice(*bounds)

    # B11: each rank holds one column
    s, _ = cut(torch.tensor([[-8.0, 8.0]]), 1)
    t, _ = cut(torch.tensor([[8.0, -8.0]]), 1)
    close(vd.vocab_parallel_jsd(s, t, 0.5, G), [0.693145])
    close(vd.vocab_parallel_jsd(s, t, 1.0, G), [15.999996])
    assert torch.equal(vd.vocab_parallel_jsd(s, t, 1.0, G), vd.vocab_parallel_kl_div(s, t, True, G))

    # B01: the masked column alone on rank 1
    rows = [[0.0, 1.0, -INF], [0.0, 0.0, -INF], [65504.0, -65504.0, -65504.0]]
    for dtype in (torch.float32, torch.float16):
        for split in (2, 1):
            x, own = cut(torch.tensor(rows).to(dtype), split)
            h = vd.vocab_parallel_entropy(x, G)
            h.sum().backward()
            close(h, [0.582203, 0.693147, 0.0])
            right = torch.tensor([[0.196612, -0.196612, 0], [0, 0, 0], [0, 0, 0]])[:, own]
            close(x.grad.float(), right, 2e-4 if dtype is torch.float16 else 2e-6)
    # its siblings: every other op with the same token masked on both sides
    x, own = cut(torch.tensor(rows[:2]), 2)
    y, _ = cut(torch.tensor([[1.0, 0.0, -INF], [0.0, 2.0, -INF]]), 2)
    ids = torch.tensor([0, 1], device=place.device)
    for name, call in _calls(x, y, ids, tp_group=G).items():
        value = call()
        grads = torch.autograd.grad(value.sum(), [x, y], allow_unused=True)
        assert value.isfinite().all(), name
        assert all(g.isfinite().all() for g in grads if g is not None), name
        if rank == 1:
            assert all((g == 0).all() for g in grads if g is not None), name

    # B04: whole leading tiles masked; the live columns are all on the last shard
    V = 10_000 if place.interpreted else 100_000
    middle, late = V // 2, 7 * V // 10
    x = torch.full((5, V), -INF)
    x[0, 0] = x[1, middle] = x[2, V - 1] = 10.0
    x[3, late : late + 4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    ids = torch.tensor([0, middle, V - 1, late + 3, 5], device=place.device)
    for split in (2 * V // 5, 1, V - 1)[: 1 if place.interpreted else 3]:
        local, _ = cut(x, split)
        lp, h = vd.vocab_parallel_logprobs_and_entropy(local, ids, G)
        close(lp[:4], [0, 0, 0, -0.440190])
        close(h[:4], [0, 0, 0, 0.947537])
        forward = vd.vocab_parallel_kl_div(local, local.detach(), False, G)
        reverse = vd.vocab_parallel_kl_div(local, local.detach(), True, G)
        js = vd.vocab_parallel_jsd(local, local.detach(), 0.5, G)
        for value in (forward, reverse, js):
            close(value[:4], [0.0] * 4)
        for value in (lp, h, forward, reverse, js):
            assert value[4].isnan()
        (lp + h + forward + reverse + js).sum().backward()
        assert local.grad.isfinite().all()
        assert (local.grad[4] == 0).all()

    # B06: infinite KL in a row whose upstream gradient is exactly 0; the masked token on rank 0
    full = torch.tensor([[0.0, 1.0, 2.0]] * 2)
    holed = torch.tensor([[0.0, -INF, 2.0], [0.0, 0.5, 2.0]])
    second = torch.tensor([False, True], device=place.device)
    right = torch.tensor([[0.0, 0.0, 0.0], [-0.0110, 0.0924, -0.0814]])
    for split in (2, 1):
        a, own = cut(full, split)
        b, _ = cut(holed, split)
        for op in (
            partial(vd.vocab_parallel_kl_div, a, b, True, G),
            partial(vd.vocab_parallel_jsd, a, b, 1.0, G),
            partial(vd.vocab_parallel_kl_div, b, a, False, G),
            partial(vd.vocab_parallel_jsd, b, a, 0.0, G),
        ):
            v = op()
            close(v, [INF, 0.021114])
            value = torch.where(second, v, 0).sum()
            grad_a, grad_b = torch.autograd.grad(value, [a, b])
            assert (grad_a[0] == 0).all()
            assert (grad_b[0] == 0).all()
            close(grad_a, right[:, own], 1e-4)
            # with an upstream gradient: finite b - a to the side that lacks the token
            grad_b = torch.autograd.grad(op().sum(), [b])[0]
            close(grad_b[0], (holed.softmax(-1) - full.softmax(-1))[0, own])

    # its sibling: the token that only one side supports underflows, on the last rank or the first
    for turned in (False, True):
        a, b = torch.tensor([[0.0, 2.0, -300.0]]), torch.tensor([[0.0, 1.0, -INF]])
        right = a.softmax(-1)
        if turned:
            a, b, right = a.flip(-1), b.flip(-1), right.flip(-1)
        gradient = b.softmax(-1) - right
        a, own = cut(a, 1 if turned else 2)
        b, _ = cut(b, 1 if turned else 2)
        for forward in (
            vd.vocab_parallel_kl_div(a, b, True, G),
            vd.vocab_parallel_kl_div(b, a, False, G),
        ):
            close(forward, [INF])
            close(torch.autograd.grad(forward, [b])[0], gradient[:, own])
        close(vd.vocab_parallel_kl_div(b, a, True, G), [0.082608])

    # numbers so far apart that their difference overflows
    a, _ = cut(torch.tensor([[3e38, -3e38]]), 1)
    b, _ = cut(torch.tensor([[3e38, -2.5e38]]), 1)
    ids = torch.tensor([0], device=place.device)
    for name, call in _calls(a, b, ids, tp_group=G).items():
        value = call()
        close(value, torch.zeros(value.shape))
        assert (torch.autograd.grad(value.sum(), [a])[0] == 0).all(), name

    # D7: NaN on one rank is NaN on all, in that row alone
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    x[0, 3] = float("nan")
    a, _ = cut(x, 2)
    b, _ = cut(torch.zeros(2, 4), 2)
    ids = torch.tensor([0, 0], device=place.device)
    for name, call in _calls(a, b, ids, tp_group=G).items():
        if name == "both":
            continue
        value = call()
        assert value[0].isnan(), name
        assert value[1].isfinite(), name
        (grad,) = torch.autograd.grad(value.sum(), [a])
        assert grad[0].isnan().all(), name
        assert grad[1].isfinite().all(), name
    return True


@at(eager=[2], interpreted=[2])
def test_small_cases_on_two_shards(tp):
    assert tp(_small_cases) == [True, True]


def _nothing_is_written(rank, world, place):
    """B23 in both orders, and for every op: inputs and their version stay as they were."""
    G = dist.group.WORLD if world > 1 else None
    for first in ("lp", "h"):
        z = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 3.0]], device=place.device)
        z = piece(z, layouts(3, world)["even"][rank], requires_grad=True)
        before, version = z.detach().clone(), z._version
        ids = torch.tensor([2, 0], device=place.device)
        if first == "lp":
            lp = vd.vocab_parallel_logprobs(z, ids, G)
            h = vd.vocab_parallel_entropy(z, G)
        else:
            h = vd.vocab_parallel_entropy(z, G)
            lp = vd.vocab_parallel_logprobs(z, ids, G)
        close(lp, [-0.1698, -3.0949], 1e-4)
        close(h, [0.5243, 0.3666], 1e-4)
        (lp.sum() + 0.1 * h.sum()).backward()
        assert torch.equal(z, before)
        assert z._version == version
    y = torch.tensor([[1.0, -2.0, 0.0], [0.0, 0.5, 3.0]], device=place.device)
    y = piece(y, layouts(3, world)["even"][rank], requires_grad=True)
    before_y, version_y = y.detach().clone(), y._version
    total = 0
    for call in _calls(z, y, ids, tp_group=G).values():
        value = call()
        total = total + value.sum()
        if value.ndim:
            with torch.no_grad():
                value[0] = 0.0  # a caller may mask the result in place before the backward
    total.backward()
    for x, old, v in ((z, before, version), (y, before_y, version_y)):
        assert torch.equal(x, old)
        assert x._version == v
        assert x.grad.isfinite().all()
    return True


@at(eager=[1, 2, 4], interpreted=[2])
def test_b23_inputs_are_never_written(tp):
    assert tp(_nothing_is_written) == [True] * tp.world
