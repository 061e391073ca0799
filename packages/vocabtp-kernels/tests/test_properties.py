"""Any shape, stride, dtype, mask, offset, id, temperature and upstream gradient against fp64."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vocabtp.kernels.testing import CASES, Inputs, run_case
from vocabtp.kernels.testing.cases import OPS, Case, truth_of

INF = float("inf")
EPS = {torch.float32: 2e-6, torch.float64: 1e-10}

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@st.composite
def logits(draw, shape, width):
    """`[*shape, width]` with a scale, an offset, masked tokens and a layout."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 8.0, 60.0]))
    pad = draw(st.integers(0, 2))
    x = torch.randn(*shape, width + pad, generator=g) * scale
    x += draw(st.sampled_from([0.0, 0.0, 1e3, -1e3]))
    kept = draw(st.sampled_from([1.0, 1.0, 0.7, 0.2]))
    x[torch.rand(x.shape, generator=g) > kept] = -INF
    if x.numel() and draw(st.integers(0, 5)) == 0:
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([float("nan"), INF]))
    if len(shape) >= 2 and draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x[..., pad:]


@st.composite
def inputs(draw):
    shape, width = draw(shapes), draw(st.integers(1, 40))
    student, teacher = draw(logits(shape, width)), draw(logits(shape, width))
    if draw(st.integers(0, 3)) == 0:
        teacher = student + draw(st.sampled_from([0.0, 1e-2]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    index = torch.randint(0, width, (*shape, draw(st.integers(0, 3))), generator=g)
    index[torch.rand(index.shape, generator=g) < 0.2] = -100
    upstream = torch.randn(shape, generator=g)
    upstream[torch.rand(shape, generator=g) < 0.3] = 0.0
    return Inputs(student, teacher, index, upstream)


@st.composite
def cuts(draw, width):
    inner = sorted(draw(st.lists(st.integers(0, width), max_size=3)))
    edges = [0, *inner, width]
    return list(pairwise(edges))


class Drawn(Case):
    """A case with a temperature of its own."""

    __slots__ = ("extra",)

    @property
    def options(self):
        return {**OPS[self.op][1], **self.extra}


@settings(deadline=None, derandomize=True, max_examples=250)
@given(data=st.data())
def test_values_and_gradients_agree_with_fp64(data):
    case = Drawn(data.draw(st.sampled_from(list(OPS))), inputs)
    temperature = data.draw(st.sampled_from([1.0, 1, 0.3, 2.5]))
    object.__setattr__(case, "extra", {"temperature": temperature})
    dtype = data.draw(dtypes)
    made = data.draw(inputs()).to(dtype, "cpu")
    width = made.student.shape[-1]
    bounds = data.draw(st.one_of(st.none(), cuts(width)))
    actual, truth = run_case(case, made, bounds=bounds), truth_of(case, made)
    wide = torch.promote_types(dtype, torch.float32)
    size = truth.size()
    for value, right in zip(actual.values, truth.values, strict=True):
        assert value.shape == right.shape
        compare(value, right, 4 * EPS[wide], 4 * EPS[wide] * size)
    for grad, right in zip(actual.grads, truth.grads, strict=True):
        assert grad.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2
        compare(grad, right, rounding + 4 * EPS[wide], 4 * EPS[wide] * size / temperature + 6e-8)
        quiet = (made.upstream == 0)[..., None].expand_as(grad)
        assert (grad[quiet] == 0).all()


def compare(actual, right, rtol, atol):
    torch.testing.assert_close(actual.double(), right, rtol=rtol, atol=atol, equal_nan=True)


def test_the_named_cases_are_all_there():
    assert {case.op for case in CASES} == set(OPS)
    assert len({case.name for case in CASES}) == len(CASES)
