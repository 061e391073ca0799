"""Hypothesis strategies for a whole call of an op: layouts, dtypes, masks, ids, upstream gradients.

What lies outside of a drawn view is NaN, so that a read outside of it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st

from vocabtp.kernels import backend
from vocabtp.kernels.testing import OPS, Inputs, assert_no_worse, run_case
from vocabtp.kernels.testing.cases import truth_of

INF, NAN = float("inf"), float("nan")
LOW = [torch.float32, torch.bfloat16, torch.float16]
# leading shapes of few rows, and of more
FEW = [(), (1,), (3,), (2, 2), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2), (0,), (2, 0)]
MORE = [*FEW, (4, 3), (2, 3, 4), (3, 5, 2), (70,), (3, 50)]
TEMPERATURES = [1.0, 1, 0.05, 0.3, 0.7, 2.5, 20.0]


@dataclass
class Drawn:
    """One call, with the interface of `vocabtp.kernels.testing.Case`."""

    op: str
    inputs: Inputs
    temperature: float
    gradients: tuple[torch.Tensor, ...]  # upstream of each value
    bounds: list[tuple[int, int]] | None  # shards, or the whole

    @property
    def name(self):
        return self.op

    @property
    def function(self):
        return OPS[self.op][0]

    @property
    def options(self):
        return {**OPS[self.op][1], "temperature": self.temperature}

    @property
    def takes_ids(self):
        return self.function.startswith("logprobs")

    def logits(self, inputs):
        both = (inputs.student, inputs.teacher)
        return both if self.function in ("kl_div", "jsd") else both[:1]

    def upstream(self, inputs, values):
        return [_moved(g, v.dtype, v.device) for g, v in zip(self.gradients, values, strict=True)]

    def __repr__(self):
        s, t = self.inputs.student, self.inputs.teacher
        sides = ", ".join(f"{x.dtype} {list(x.shape)} {x.stride()}" for x in (s, t))
        return f"{self.op} T={self.temperature} {sides} ids {list(self.inputs.index.shape)}"


def _moved(x, dtype, device):
    """On another device with its strides; a tensor without elements has nothing to keep."""
    if not x.numel():
        return x.to(device, dtype)
    size = x.untyped_storage().nbytes() // x.element_size()
    buffer = x.as_strided((size,), (1,), 0).to(device, dtype)
    return buffer.as_strided(x.shape, x.stride(), x.storage_offset())


@st.composite
def view(draw, data, pads, apart):
    """`data` in a larger buffer: dimensions turned, every second index, a window of columns.

    `pads` are the columns before and after the window, `apart` is the stride of the vocabulary.
    """
    lead = data.dim() - 1
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in range(lead)]
    left, right = pads
    order = draw(st.permutations(range(lead))) if lead else []
    sizes = [data.shape[i] * steps[i] for i in order]
    buffer = torch.full((2, *sizes, (left + data.shape[-1] + right) * apart), NAN, dtype=data.dtype)
    out = buffer[1].permute(*[order.index(i) for i in range(lead)], lead)
    for i, step in enumerate(steps):
        out = out.narrow(i, 0, data.shape[i] * step)
        out = out[(slice(None),) * i + (slice(None, None, step),)]
    out = out[..., ::apart][..., left : left + data.shape[-1]]
    assert out.shape == data.shape
    out.copy_(data)
    return out


@st.composite
def mask(draw, shape, g):
    """Which tokens are outside the support."""
    kind = draw(st.sampled_from(["none", "none", "few", "most", "half", "one left", "a row"]))
    out = torch.zeros(shape, dtype=torch.bool)
    width = shape[-1]
    if kind in ("few", "most"):
        out = torch.rand(shape, generator=g) < (0.2 if kind == "few" else 0.9)
    elif kind == "half":
        out[..., : width // 2] = True
    elif kind == "one left" and width:
        out[:] = True
        out[..., draw(st.integers(0, width - 1))] = False
    elif kind == "a row":
        out = (torch.rand(shape[:-1], generator=g) < 0.4)[..., None].expand(shape)
    return out


@st.composite
def side(draw, shape, g):
    """fp32 logits of one side."""
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 1.0, 8.0, 60.0]))
    x = torch.randn(*shape, generator=g) * scale
    x += draw(st.sampled_from([0.0, 0.0, 0.0, 1e3, -1e4, 1e4]))
    if x.numel() and draw(st.integers(0, 7)) == 0:
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([NAN, INF]))
    return x


@st.composite
def upstream(draw, shape, g):
    """A gradient for values of this shape, in any layout."""
    kind = draw(st.sampled_from(["plain", "plain", "one number", "strided", "turned"]))
    if kind == "one number":  # what .sum() hands down
        return torch.tensor(draw(st.sampled_from([1.0, 0.0, -2.5]))).expand(shape)
    x = torch.randn(shape, generator=g)
    x[torch.rand(shape, generator=g) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    if draw(st.integers(0, 9)) == 0:
        x[torch.rand(shape, generator=g) < 0.3] = NAN
    if kind == "strided" and x.dim():
        return torch.stack((x, torch.full_like(x, NAN)), -1)[..., 0]
    if kind == "turned" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


@st.composite
def layout(draw, dtypes):
    """Dtypes of both sides and pads of both."""
    kinds = [draw(st.sampled_from(dtypes))] * 2
    if draw(st.integers(0, 2)) == 0:
        kinds[1] = draw(st.sampled_from(dtypes))
    pads = st.sampled_from([0, 0, 1, 3, 16])
    return *kinds, *((draw(pads), draw(pads)) for _ in kinds)


@st.composite
def cuts(draw, width, unit):
    """Shards of a vocabulary, some of them empty, that begin at a multiple of `unit`."""
    inner = sorted(unit * i for i in draw(st.lists(st.integers(0, width // unit), max_size=3)))
    return list(pairwise([0, *inner, width]))


@st.composite
def calls(draw, widths, ids, dtypes=tuple(LOW), leads=tuple(FEW), layouts=None):
    """A call with `widths` columns and up to `ids` ids a row.

    With `layouts`, some of what `layout` draws, kernels are compiled for those alone: no other
    dtypes or pads, every vocabulary with a stride of 1, shards of whole 64 columns but the last.
    """
    op = draw(st.sampled_from(list(OPS)))
    lead = draw(st.sampled_from(leads))
    # without a column there is no id to ask for, not even one to ignore
    width = max(draw(widths), int(op.startswith("logprobs")))
    shape = (*lead, width)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    student, teacher = draw(side(shape, g)), draw(side(shape, g))
    if draw(st.integers(0, 3)) == 0:  # nearly equal
        teacher = student + draw(st.sampled_from([0.0, 1e-3, 1e-1])) * torch.randn(
            shape, generator=g
        )
    outside = draw(mask(shape, g))
    student = student.masked_fill(outside, -INF)
    if draw(st.booleans()):
        outside = draw(mask(shape, g))
    teacher = teacher.masked_fill(outside, -INF)
    few = layouts is not None
    *kinds, pads_s, pads_t = draw(st.sampled_from(layouts) if few else layout(dtypes))
    apart = st.just(1) if few else st.sampled_from([1] * 9 + [2])
    student = draw(view(student.to(kinds[0]), pads_s, draw(apart)))
    teacher = draw(view(teacher.to(kinds[1]), pads_t, draw(apart)))
    each = (draw(st.integers(0, ids)),) if draw(st.integers(0, 3)) else ()
    index = torch.randint(0, max(width, 1), (*lead, *each), generator=g)
    if draw(st.booleans()):  # many of the same
        index = index.clamp(max=draw(st.integers(0, max(width - 1, 0))))
    index[torch.rand(index.shape, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -100
    index = index.to(draw(st.sampled_from([torch.int64, torch.int32])))
    gradients = [draw(upstream(index.shape if op.startswith("logprobs") else lead, g))]
    if op == "logprobs_and_entropy":
        gradients.append(draw(upstream(lead, g)))
    return Drawn(
        op,
        Inputs(student, teacher, index, gradients[0]),
        draw(st.sampled_from(TEMPERATURES)),
        tuple(gradients),
        draw(st.one_of(st.none(), cuts(width, 64 if few else 1))),
    )


def check(call, implementation, device="cpu", slack=4.0, roundings=4):
    """Judge a drawn call by the rule: fp64 truth, the eager path's error, and a floor."""
    made = Inputs(
        _moved(call.inputs.student, call.inputs.student.dtype, device),
        _moved(call.inputs.teacher, call.inputs.teacher.dtype, device),
        call.inputs.index.to(device),
        call.inputs.upstream,
    )
    with backend("eager"):
        eager = run_case(call, made)
    actual = eager
    if implementation == "triton" or call.bounds is not None:
        with backend(implementation):
            actual = run_case(call, made, _in(implementation, call.function), call.bounds)
    truth = truth_of(call, call.inputs)
    sides = call.logits(made)
    wide = torch.promote_types(sides[0].dtype, sides[-1].dtype)
    eps = torch.finfo(torch.promote_types(wide, torch.float32)).eps
    floor = roundings * eps * truth.size()
    for i, triple in enumerate(zip(actual.values, eager.values, truth.values, strict=True)):
        assert_no_worse(*triple, slack=slack, floor=floor, what=f"value {i}")
    floor *= max(1.0, 1 / call.temperature)
    boundless = (truth.values[0] == INF)[..., None] if len(sides) == 2 else None
    for i, (mine, other, right) in enumerate(
        zip(actual.grads, eager.grads, truth.grads, strict=True)
    ):
        assert mine.dtype == sides[i].dtype
        assert mine.is_contiguous()
        # what the dtype cannot hold is infinite; its smallest number
        right = torch.where(right.to(mine.dtype).isinf(), right.to(mine.dtype).double(), right)
        if boundless is not None:
            # of an infinite KL the gradient is non-finite, whichever way: p may underflow
            right = torch.where(boundless & ~mine.cpu().isfinite() & ~right.isfinite(), NAN, right)
            mine = torch.where(boundless.to(mine.device) & ~mine.isfinite(), NAN, mine)
        least = floor + torch.finfo(mine.dtype).smallest_normal * torch.finfo(mine.dtype).eps
        assert_no_worse(mine, other, right, slack=slack, floor=least, what=f"gradient {i}")
    return actual, truth


def _in(implementation, function):
    """The public op under the implementation, in whichever thread it is called."""
    import vocabtp.kernels as vk

    def op(*args, **options):
        with backend(implementation):
            return getattr(vk, function)(*args, **options)

    return op
