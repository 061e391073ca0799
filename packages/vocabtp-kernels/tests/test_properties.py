"""Any shape, stride, dtype, mask, offset, id, temperature and upstream gradient against fp64."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from drawn import LOW, MORE, calls, check
from vocabtp.kernels.testing import CASES
from vocabtp.kernels.testing.cases import OPS

EPS = {torch.float32: 2e-6, torch.float64: 1e-10}
# to find a smaller call that fails takes minutes: drop `phases` when it is worth them
TRITON = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

# around the tiles and blocks of the kernels
around = st.sampled_from([1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097])


@settings(deadline=None, derandomize=True, max_examples=250)
@given(calls(st.integers(0, 40), ids=3, dtypes=(*LOW, torch.float64), leads=MORE))
def test_eager_agrees_with_fp64(call):
    """By absolute bounds: the eager path is the yardstick of the others."""
    actual, truth = check(call, "eager")
    sides = call.logits(call.inputs)
    wide = torch.promote_types(torch.promote_types(sides[0].dtype, sides[-1].dtype), torch.float32)
    size = truth.size()
    for value, right in zip(actual.values, truth.values, strict=True):
        assert value.shape == right.shape
        compare(value, right, 4 * EPS[wide], 4 * EPS[wide] * size)
    for grad, right in zip(actual.grads, truth.grads, strict=True):
        rounding = torch.finfo(grad.dtype).eps / 2
        right = torch.where(right.to(grad.dtype).isinf(), right.to(grad.dtype).double(), right)
        finite = right.isfinite()  # the others are judged by check
        grad, right = grad[finite], right[finite]
        atol = 4 * EPS[wide] * size * max(1.0, 1 / call.temperature) + 6e-8
        compare(grad, right, rounding + 4 * EPS[wide], atol)
    quiet(call, actual)


def compare(actual, right, rtol, atol):
    torch.testing.assert_close(actual.double(), right, rtol=rtol, atol=atol, equal_nan=True)


def quiet(call, actual):
    """An upstream gradient of 0 is a gradient of exactly 0, whatever the row holds."""
    lead = call.inputs.student.shape[:-1]
    idle = torch.ones(lead, dtype=torch.bool)
    for g in call.gradients:
        idle &= (g.reshape(*lead, g.numel() // max(lead.numel(), 1)) == 0).all(-1)
    for grad in actual.grads:
        assert (grad.cpu()[idle] == 0).all()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=75, **TRITON)
@given(calls(st.one_of(st.integers(0, 40), around), ids=4))
def test_interpreted_triton_agrees_with_fp64(call):
    actual, _ = check(call, "triton")
    quiet(call, actual)


# of each kernel a few variants, since the compiler takes a second for each: widths that 16 divides
# and others, and of both sides dtypes and columns before and after the window
WIDTHS = [1, 300, 1024, 4097, 8192, 32_000, 75_967]
LAYOUTS = [
    (torch.bfloat16, torch.bfloat16, (16, 0), (0, 16)),
    (torch.float16, torch.float32, (1, 3), (3, 0)),
]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@settings(max_examples=120, **TRITON)
@given(calls(st.sampled_from(WIDTHS), ids=20, leads=MORE, layouts=LAYOUTS))
def test_compiled_triton_agrees_with_fp64(call):
    # twice the floor: the hardware logarithm of JSD's quick way
    actual, _ = check(call, "triton", torch.accelerator.current_accelerator(), roundings=8)
    quiet(call, actual)


def test_the_named_cases_are_all_there():
    assert {case.op for case in CASES} == set(OPS)
    assert len({case.name for case in CASES}) == len(CASES)
