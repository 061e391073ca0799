"""The Triton kernels under Triton's interpreter: small shapes, every op, every edge."""

from dataclasses import replace

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import _eager, reference
from vocabtp.kernels.testing import OPS, check_case
from vocabtp.kernels.testing.cases import Case
from vocabtp.kernels.testing.inputs import Inputs, copies, lowest, narrow, no_rows, one_row, views

INF, NAN = float("inf"), float("nan")
WIDTH = 301

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy's, for what a chip does silently
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def edges():
    """One row for each thing that a row can be."""
    g = torch.Generator().manual_seed(0)
    s, t = (torch.randn(19, WIDTH, generator=g) * 3 for _ in range(2))
    index = torch.randint(0, WIDTH, (19, 2), generator=g)
    upstream = torch.randn(19, generator=g)
    index[0, 0], index[1] = -100, torch.tensor([7, 7])
    s[2, :], t[2, :] = -INF, -INF  # one token left
    s[2, 300] = t[2, 300] = 1.0
    s[3, :200], t[3, :200] = -INF, -INF
    s[4, ::2], t[4, ::2] = -INF, -INF
    s[5, 3:9] = -INF  # one side's support is smaller
    t[6, 290:] = -INF
    s[7, :150], t[7, 150:] = -INF, -INF
    t[8, 5], s[8, 5] = -INF, -300.0  # masked for one, underflowing for the other
    t[9, 40] = -INF
    upstream[9] = 0.0
    s[10] = -INF  # no distribution
    t[11] = -INF
    s[12, 5] = NAN
    t[13, 300] = INF
    s[14] += 3e4  # far from 0, each in its own way
    t[14] -= 3e4
    s[15, ::2], s[15, 1::2], t[15] = 65504.0, -65504.0, -s[15]
    t[16] = s[16] + 1e-3 * torch.randn(WIDTH, generator=g)  # nearly equal
    s[17], t[17] = torch.finfo(torch.float16).min, 0.0
    s[18, 3], upstream[18] = NAN, 0.0  # nobody asks
    return Inputs(s, t, index, upstream)


def run(case, **options):
    def op(*args, **more):
        with vk.backend("triton"):
            return getattr(vk, case.function)(*args, **more)

    check_case(case, op, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_edges(op, dtype):
    run(Case(op, edges), dtype=dtype)


# one op of each kind: an interpreted kernel takes a second
KINDS = ["logprobs_and_entropy", "reverse_kl", "jsd"]


def one_id():
    made = edges()
    return replace(made, index=made.index[:, :1])


@pytest.mark.parametrize("op", ["logprobs", "logprobs_and_entropy"])
def test_edges_with_one_id(op):
    run(Case(op, one_id))


@pytest.mark.parametrize("op", [*KINDS, "forward_kl_clip", "jsd_high_clip"])
def test_edges_in_fp16(op):
    run(Case(op, edges), dtype=torch.float16)


@pytest.mark.parametrize(
    "make", [narrow, one_row, views, copies, no_rows], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("op", KINDS)
def test_layouts(op, make):
    run(Case(op, make))


@pytest.mark.parametrize("call", KINDS, indirect=True)
def test_rows_that_begin_at_an_odd_element(call):
    """Of a flat buffer of two bytes an element; the bits of the same rows at its beginning."""
    g = torch.Generator().manual_seed(2)
    flat = [torch.randn(3 + 2 * 37, generator=g).bfloat16() for _ in range(2)]
    sides = [x[at : at + 74].view(2, 37) for x, at in zip(flat, (1, 3), strict=True)]
    index = torch.tensor([[0, 36]] * 2)
    got = values_and_gradients(call, *sides, index, torch.ones(2))
    want = values_and_gradients(call, *[x.clone() for x in sides], index, torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", ["entropy", "forward_kl", "reverse_kl", "reverse_kl_clip", "jsd"])
def test_the_lowest_number_is_no_mask(op):
    run(Case(op, lowest))


def several():
    """Two rows of several segments, the first segment of one without support."""
    g = torch.Generator().manual_seed(1)
    s, t = (torch.randn(3, 1291, generator=g) * 3 for _ in range(2))
    s[0, :540], t[0, :540] = -INF, -INF
    t[1] = s[1] + 1e-3 * torch.randn(1291, generator=g)
    s[2, :700] -= 200.0
    return Inputs(s, t, torch.tensor([[900, 3], [1, 1], [1290, 0]]), torch.randn(3, generator=g))


@pytest.mark.parametrize("op", OPS)
def test_segments(op, small):
    assert small.segments(1291).number == 3
    run(Case(op, several))


@pytest.mark.parametrize("op", [*KINDS, "forward_kl_clip", "jsd_clip"])
def test_shards(op, small):
    run(Case(op, several), bounds=[(0, 0), (0, 690), (690, 1291)], slack=4.0)


def test_how_rows_are_cut():
    from vocabtp.kernels._triton import launch

    for cols in (0, 1, 4096, 8193, 32_000, 37_984, 75_967, 75_968, 151_936, 262_144, 3_000_000):
        cut = launch.segments(cols)
        assert 1 <= cut.number <= 8
        assert cut.cols % launch.STEP == 0
        assert (cut.number - 1) * cut.cols < max(cols, 1) <= cut.number * cut.cols


def values_and_gradients(call, s, t, index, upstream):
    leaves = [s.detach().requires_grad_(), t.detach().requires_grad_()][: call.sides]
    with vk.backend("triton"):
        values = call(*leaves, index=index, temperature=1.3)
    lead = [
        (upstream if v.shape == upstream.shape else upstream[:, None]).expand_as(v) for v in values
    ]
    return (*values, *torch.autograd.grad(values, leaves, lead))


def test_a_rows_bits(call, small):
    """Among more and fewer rows, strided or not, as bf16 and fp32 of the same numbers."""
    g = torch.Generator().manual_seed(3)
    s = (torch.randn(5, 303, generator=g) * 4).bfloat16()
    t = (s + torch.randn(5, 303, generator=g)).bfloat16()
    t[3] = s[3]
    s[:, 8], t[:, 7] = -INF, -INF  # the same column of both views
    index = torch.randint(0, 302, (5, 2), generator=g)
    upstream = torch.randn(5, generator=g)
    batch = values_and_gradients(call, s[:, 1:], t[:, :-1], index, upstream)
    # one row for each way of JSD's sums
    fewer = values_and_gradients(
        call, s[3:, 1:].clone(), t[3:, :-1].clone(), index[3:], upstream[3:]
    )
    for few, many in zip(fewer, batch, strict=True):
        assert torch.equal(few, many[3:])
    wide = values_and_gradients(call, s[:, 1:].float(), t[:, :-1].float(), index, upstream)
    for low, full in zip(batch, wide, strict=True):
        assert torch.equal(low, full.to(low.dtype))


def test_gradients_only_where_needed(call):
    if call.sides == 1:
        return
    made = edges()
    sides = [made.student[:2], made.teacher[:2]]
    right = call.true_gradients(*sides, upstream=[torch.ones(2)])
    for which in (0, 1):
        leaves = [x.clone().requires_grad_(side == which) for side, x in enumerate(sides)]
        with vk.backend("triton"):
            call(*leaves)[0].sum().backward()
        assert leaves[1 - which].grad is None
        torch.testing.assert_close(leaves[which].grad.double(), right[which], rtol=2e-5, atol=1e-6)


def test_sides_of_different_dtypes(call):
    if call.sides == 1:
        return
    made = edges()
    s, t = made.student[:2].half(), made.teacher[:2].bfloat16()
    leaves = [s.requires_grad_(), t.requires_grad_()]
    with vk.backend("triton"):
        (value,) = call(*leaves)
        assert torch.equal(value, call(s.float(), t.float())[0])
    value.sum().backward()
    assert [x.grad.dtype for x in leaves] == [torch.float16, torch.bfloat16]
    right = call.true_gradients(*leaves, upstream=[torch.ones(2)])
    for leaf, truth in zip(leaves, right, strict=True):
        eps = torch.finfo(leaf.dtype).eps
        torch.testing.assert_close(leaf.grad.double(), truth, rtol=eps, atol=1e-6)


@pytest.mark.parametrize("difference", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("beta", [1e-12, 0.02, 0.1, 0.5, 1 - 1e-6])
def test_nearly_equal_sides(difference, beta):
    g = torch.Generator().manual_seed(4)
    s = torch.randn(1, 2000, generator=g) * 3
    t = s + difference * torch.randn(1, 2000, generator=g)
    p, q = s.double().log_softmax(-1), t.double().log_softmax(-1)
    # the mixture's own form in fp64 has no digits left at the ends
    log_mp = torch.log1p(beta * torch.expm1(q - p))
    log_mq = torch.log1p((1 - beta) * torch.expm1(p - q))
    truth = -(q.exp() * log_mq / (1 - beta) + p.exp() * log_mp / beta).sum(-1)
    leaf = s.clone().requires_grad_()
    with vk.backend("triton"):
        value = vk.jsd(leaf, t, beta=beta, rescale=True)
    value.sum().backward()
    assert ((value - truth).abs() <= 1e-3 * truth).all()
    mean = (p.exp() * log_mp).sum(-1, keepdim=True)
    right = p.exp() * (mean - log_mp) / beta
    assert (leaf.grad - right).norm() <= 2e-3 * right.norm()
    for reverse in (False, True):
        leaves = [s.clone().requires_grad_(), t.clone().requires_grad_()]
        with vk.backend("triton"):
            value = vk.kl_div(*leaves, reverse=reverse)
        assert (value - reference.kl_div(s, t, reverse=reverse)).abs().max() <= 1e-6
        value.sum().backward()
        rights = reference.gradients(reference.kl_div, [s, t], [torch.ones(1)], reverse=reverse)
        # the side whose gradient is centred on W / S
        side = 0 if reverse else 1
        assert (leaves[side].grad - rights[side]).norm() <= 2e-4 * rights[side].norm()


def test_a_compiler_that_gives_up_is_named_once(monkeypatch):
    from vocabtp.kernels._rows import as_rows
    from vocabtp.kernels._triton import UNLESS_BROKEN, fallback, launch

    def gives_up(*args, **options):
        raise launch.CannotCompile("no such target")

    a, b = (as_rows(torch.randn(2, 9)) for _ in range(2))
    right = _eager.kl_stats(a, b, torch.float32, 1.0, merged=True)
    monkeypatch.setattr(fallback, "_broken", set())
    for name, value in (("run", gives_up), ("name", lambda device: "Chip 7")):
        monkeypatch.setattr(launch, name, value)
    with pytest.warns(UserWarning, match="Triton kernels do not work on Chip 7.*no such target"):
        first = UNLESS_BROKEN.kl_stats(a, b, torch.float32, 1.0, merged=True)
    # the second call does not try, nor warn
    second = UNLESS_BROKEN.kl_stats(a, b, torch.float32, 1.0, merged=True)
    for stats in (first, second):
        assert all(torch.equal(x, y) for x, y in zip(stats, right, strict=True))


def test_which_backend_on_the_cpu():
    x = torch.zeros(2, 3)
    assert vk.which_backend(x) == ("eager", "the tensors are on the CPU")
    with vk.backend("triton"):
        assert vk.which_backend(x.bfloat16(), x)[0] == "triton"
        with pytest.raises(ValueError, match="fp64 runs in eager"):
            vk.which_backend(x, x.double())
        with pytest.raises(ValueError, match="no Triton kernels for meta tensors"):
            vk.which_backend(torch.zeros(2, 3, device="meta"))


@pytest.mark.parametrize("op", KINDS)
def test_lazily_negated_tensors_are_what_they_stand_for(op):
    s, t = torch.randn(3, 9), torch.randn(3, 9)
    index, upstream = torch.tensor([4, 0, 8]), torch.randn(3)

    def run(negate):
        name, options = OPS[op]
        token = name == "logprobs_and_entropy"
        sides = [negate(x.clone()).requires_grad_() for x in ((s,) if token else (s, t))]
        with vk.backend("triton"):
            out = getattr(vk, name)(*sides, *[negate(-index)] * token, **options)
        outs = out if token else (out,)
        up = [torch.complex(upstream, upstream).conj().imag for _ in outs]
        up = up if negate is torch._neg_view else [x.resolve_neg() for x in up]
        return [*outs, *torch.autograd.grad(outs, sides, up)]

    for lazy, plain in zip(run(torch._neg_view), run(torch.neg), strict=True):
        assert torch.equal(lazy, plain)
