"""Gradients: gradcheck in fp64, whole and in shards, and the contract with autograd."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vocabtp.kernels as vk
from vocabtp.kernels import _backend, _calls, _eager, reference
from vocabtp.kernels.testing import run_sharded

BOUNDS = {
    "whole": [(0, 7)],
    "uneven": [(0, 4), (4, 7)],
    "empty": [(0, 0), (0, 2), (2, 2), (2, 7)],
}


def pair(seed=0, shape=(5, 7)):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True) for _ in "st"]


IDS = torch.tensor([[0, 0, -100], [1, 6, 3], [4, 5, 6], [-100, -100, -100], [2, 2, 2]])


class Sharded(torch.autograd.Function):
    """An op cut into shards in one process, as one function of whole tensors."""

    @staticmethod
    def forward(ctx, call, bounds, options, *sides):
        ctx.call, ctx.bounds, ctx.options = call, bounds, options
        ctx.save_for_backward(*sides)
        return tuple(v.detach() for v in Sharded.run(ctx, sides, None)[0][0])

    @staticmethod
    def backward(ctx, *upstream):
        results = Sharded.run(ctx, ctx.saved_tensors, upstream)
        grads = [torch.cat(parts, -1) for parts in zip(*[r[1] for r in results], strict=True)]
        return None, None, None, *grads

    @staticmethod
    def run(ctx, sides, upstream):
        width = sides[0].shape[-1]

        def rank(exchange, a, b):
            leaves = [x.detach()[:, a:b].clone().requires_grad_() for x in sides]
            more = {"vocab_start": a, "vocab_size": width} if ctx.call.takes_ids else {}
            with torch.enable_grad():
                values = ctx.call(*leaves, exchange=exchange, index=IDS[:3], **more, **ctx.options)
            return values, upstream and torch.autograd.grad(values, leaves, upstream)

        return run_sharded(rank, ctx.bounds)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradcheck(call, temperature):
    sides = pair()[: call.sides]
    assert torch.autograd.gradcheck(lambda *x: call(*x, index=IDS, temperature=temperature), sides)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gradcheck_of_shards(call, bounds):
    # three rows: threads of ranks are slow
    sides = [x.detach()[:3].requires_grad_() for x in pair()[: call.sides]]
    options = {"temperature": 1.7}
    assert torch.autograd.gradcheck(
        lambda *x: Sharded.apply(call, BOUNDS[bounds], options, *x), sides
    )


def test_gradcheck_of_masked_rows(call):
    sides = pair(3)[: call.sides]
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[0, :3], mask[1, 6], mask[2, 1::2] = True, True, True
    ids = torch.tensor([[5], [0], [0], [1], [2]])

    def masked(*x):
        # finite differences through the mask: -inf stays where it is
        return call(*[side.masked_fill(mask, -float("inf")) for side in x], index=ids)

    assert torch.autograd.gradcheck(masked, sides)


def test_gradients_are_contiguous_and_only_where_needed(call):
    s, t = (x.detach().float().requires_grad_() for x in pair(1, (4, 6, 9)))
    index = torch.zeros(4, 6, dtype=torch.int64)
    values = call(s.transpose(0, 1), t.detach().transpose(0, 1), index=index.t())
    sum(v.sum() for v in values).backward()
    assert s.grad.shape == s.shape
    assert t.grad is None
    if call.sides == 2:
        s.grad = None
        call(s.detach(), t)[0].sum().backward()
        assert s.grad is None
        right = call.true_gradients(s, t, upstream=[torch.ones(4, 6)])
        torch.testing.assert_close(t.grad.double(), right[1], rtol=1e-5, atol=1e-7)
        # nobody needs anything
        assert not call(s.detach(), t.detach())[0].requires_grad


class Curves(TorchDispatchMode):
    """Counts the numbers that exp, log and their like give."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if re.match(r"(exp|expm1|log|log1p)_?$", func.overloadpacket.__name__):
            self.count += out.numel()
        return out


def curves_of_backward(op, needs):
    # wide, so that what is counted is `[N, L]`
    leaves = [x.detach().requires_grad_(n) for x, n in zip(pair(0, (2, 500)), needs, strict=True)]
    value = op(*leaves).sum()
    with Curves() as curves:
        value.backward()
    return curves.count


@pytest.mark.parametrize(
    ("op", "side"),
    [
        (vk.jsd, "student"),
        (vk.jsd, "teacher"),
        (vk.kl_div, "teacher"),  # the student's is q - p, of both
        (lambda s, t: vk.kl_div(s, t, reverse=True), "student"),
        (lambda s, t: vk.kl_div(s, t, reverse=True, pointwise_clip=0.1), "student"),
    ],
)
def test_one_sides_gradient_takes_half_of_the_work_of_both(op, side):
    both = curves_of_backward(op, (True, True))
    one = curves_of_backward(op, (side == "student", side == "teacher"))
    assert 1000 <= one <= both * 0.52


def test_values_may_be_masked_in_place_before_the_backward(call):
    plain = [x.detach().float().requires_grad_() for x in pair()][: call.sides]
    leaves = [x.detach().clone().requires_grad_() for x in plain]
    keep = torch.tensor([True, False, True, True, False])
    for sides, in_place in ((plain, False), (leaves, True)):
        total = 0.0
        for value in call(*sides, index=IDS):
            if in_place:
                value[~keep] = 0.0
                value.mul_(3.0)
            else:
                value = torch.where(keep.view(-1, *[1] * (value.dim() - 1)), value, 0.0) * 3.0
            total = total + value.sum()
        total.backward()
    for one, other in zip(plain, leaves, strict=True):
        assert torch.equal(one.grad, other.grad)
        assert (one.grad[~keep] == 0).all()
        assert one.grad[0].abs().sum() > 0


def test_inputs_keep_their_bits_and_their_version(call):
    sides = [x.detach().clone().requires_grad_() for x in pair()][: call.sides]
    index = IDS.clone()
    before, versions = [x.detach().clone() for x in sides], [x._version for x in sides]
    values = call(*sides, index=index)
    assert torch.equal(index, IDS)
    assert index._version == 0
    sum(v.sum() for v in values).backward()
    for side, old, version in zip(sides, before, versions, strict=True):
        assert torch.equal(side, old)
        assert side._version == version
    right = call.true_gradients(*before, upstream=[torch.ones_like(v) for v in values], index=IDS)
    for side, truth in zip(sides, right, strict=True):
        torch.testing.assert_close(side.grad, truth, rtol=1e-9, atol=1e-12)


def test_logits_changed_before_the_backward_are_refused(call):
    sides = [x.detach().clone().requires_grad_() for x in pair()][: call.sides]
    moved = [x * 1 for x in sides]
    values = call(*moved, index=IDS)
    moved[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(v.sum() for v in values).backward()


@pytest.mark.parametrize("constant", [True, False])
def test_double_backward_is_refused(call, constant):
    sides = pair()[: call.sides]
    values = call(*sides, index=IDS)
    total = sum(v.sum() if constant else v.pow(2).sum() for v in values)
    plain = torch.autograd.grad(total, sides, retain_graph=True)
    grads = torch.autograd.grad(total, sides, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))
    # a penalty next to another term must not pass as a constant
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        (grads[-1].pow(2).sum() + sides[0].sum()).backward()


def test_an_upstream_gradient_of_zero_is_a_gradient_of_zero(call):
    inf = float("inf")
    s, t = (x.detach().float() for x in pair(2))
    s[0, 1], t[0, 1], s[1], t[2, 3], s[3, 0], t[4, 6] = float("nan"), inf, -inf, -inf, inf, -inf
    s.requires_grad_(), t.requires_grad_()
    values = call(s, t, index=IDS)
    torch.autograd.backward(values, [torch.zeros_like(v) for v in values])
    for side in (s, t)[: call.sides]:
        assert (side.grad == 0).all()


def test_one_output_alone_has_the_gradient_of_its_own_op():
    s = pair()[0].detach()
    for which, alone in ((0, lambda x: vk.logprobs(x, IDS)), (1, vk.entropy)):
        one, two = s.clone().requires_grad_(), s.clone().requires_grad_()
        vk.logprobs_and_entropy(one, IDS)[which].pow(2).sum().backward()
        alone(two).pow(2).sum().backward()
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


def test_infinite_and_nan_upstream_propagate(call):
    s, t = (x.detach().float() for x in pair(4))
    for upstream in (float("inf"), float("nan")):
        leaves = [s.clone().requires_grad_(), t.clone().requires_grad_()][: call.sides]
        values = call(*leaves, index=IDS)
        weights = [torch.ones_like(v) for v in values]
        for weight in weights:
            weight[1] = upstream
        torch.autograd.backward(values, weights)
        for leaf in leaves:
            assert not leaf.grad[1].isfinite().any()
            assert leaf.grad[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_inside(call, dtype):
    s, t = (x.detach().float() for x in pair())
    results = []
    for enabled in (False, True):
        leaves = [s.clone().requires_grad_(), t.clone().requires_grad_()][: call.sides]
        with torch.autocast("cpu", dtype, enabled=enabled):
            values = call(*leaves, index=IDS)
            sum(v.sum() for v in values).backward()
        results.append((*values, *[x.grad for x in leaves]))
    for plain, cast in zip(*results, strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(plain, cast)


def test_autocast_is_off_where_an_implementation_runs(call, monkeypatch):
    seen = []

    class Watched:
        def __getattr__(self, name):
            seen.append((name, torch.is_autocast_enabled("cpu")))
            return getattr(_eager, name)

    choice = _backend.Choice(Watched(), "watched", "a test")
    monkeypatch.setattr(_calls, "choose", lambda caller, *x: choice)
    leaves = [x.detach().float().requires_grad_() for x in pair()][: call.sides]
    with torch.autocast("cpu", torch.bfloat16):
        sum(v.sum() for v in call(*leaves, index=IDS)).backward()
    assert {name.split("_")[-1] for name, _ in seen} >= {"stats", "grad"}
    assert not any(enabled for _, enabled in seen)


def test_no_grad_and_inference_mode_give_the_same_values(call):
    s, t = (x.detach().float().requires_grad_() for x in pair())
    right = call(s, t, index=IDS)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            values = call(s, t, index=IDS)
        assert all(torch.equal(a, b) for a, b in zip(values, right, strict=True))
        assert not values[0].requires_grad


def test_sides_of_different_dtypes(call):
    if call.sides == 1:
        return
    s, t = (x.detach() for x in pair())
    for one, two in (
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
    ):
        leaves = [s.to(one).requires_grad_(), t.to(two).requires_grad_()]
        (value,) = call(*leaves)
        wide = torch.float64 if torch.float64 in (one, two) else torch.float32
        assert value.dtype == wide
        assert torch.equal(value, call(*[x.to(wide) for x in leaves])[0])
        value.sum().backward()
        right = call.true_gradients(*leaves, upstream=[torch.ones(5)])
        for leaf, truth in zip(leaves, right, strict=True):
            assert leaf.grad.dtype == leaf.dtype
            eps = torch.finfo(leaf.dtype).eps
            torch.testing.assert_close(leaf.grad.double(), truth, rtol=eps, atol=1e-6)


def test_the_gradient_of_ids_that_repeat_adds_up():
    x = torch.zeros(1, 3, requires_grad=True)
    vk.logprobs(x, torch.tensor([[2, 2, 0, -100]])).sum().backward()
    third = 1 / 3
    right = torch.tensor([[1 - 3 * third, -3 * third, 2 - 3 * third]])
    torch.testing.assert_close(x.grad, right, atol=1e-6, rtol=0)
    truth = reference.gradients(
        reference.logprobs, [x], [torch.ones(1, 4)], index=torch.tensor([[2, 2, 0, -100]])
    )
    torch.testing.assert_close(x.grad.double(), truth[0], atol=1e-6, rtol=0)
