"""The public ops on every conformance case: eager by absolute bounds, shards by the rule."""

import threading

import pytest
import torch

from vocabtp.kernels.testing import CASES, assert_no_worse, check_case, run_case, run_sharded
from vocabtp.kernels.testing.cases import truth_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# the fp64 reference is not centred: at an offset of 6e4 it has no more digits than this
EPS = {torch.float32: 1e-6, torch.float64: 1e-11}


def by_name(case):
    return case.name


def assert_within_bounds(case, dtype, device="cpu", bounds=None):
    inputs = case.make().to(dtype, device)
    actual = run_case(case, inputs, bounds=bounds)
    truth = truth_of(case, inputs)
    wide = torch.promote_types(dtype, torch.float32)
    size = truth.size()
    for value, right in zip(actual.values, truth.values, strict=True):
        assert value.dtype == wide
        check(value, right, wide, size, 0.0)
    for grad, right in zip(actual.grads, truth.grads, strict=True):
        assert grad.dtype == dtype
        assert grad.is_contiguous()
        # what the output's dtype cannot hold: half a step, and its smallest number
        check(grad, right, wide, size, torch.finfo(dtype).eps / 2)


def check(actual, right, wide, size, rounding):
    atol = 4 * EPS[wide] * size + (6e-8 if rounding else 0.0)
    torch.testing.assert_close(
        actual.double().cpu(), right, rtol=rounding + 4 * EPS[wide], atol=atol, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_eager_is_within_fp32_rounding_of_fp64(case, dtype):
    assert_within_bounds(case, dtype)


def uneven(width):
    """Five shards with an empty one first and another inside."""
    a, b, c = width // 5, width // 2, width - width // 7
    return [(0, 0), (0, a), (a, b), (b, b), (b, c), (c, width)]


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_shards_are_no_worse_than_the_whole(case):
    width = case.make().student.shape[-1]
    check_case(case, bounds=uneven(width), slack=4.0)


def test_a_rank_without_support_changes_nothing(call):
    # all live columns on the last of two shards, the first one entirely -inf
    g = torch.Generator().manual_seed(2)
    s, t = torch.randn(3, 20, generator=g), torch.randn(3, 20, generator=g)
    s[:, :10], t[:, :10] = -float("inf"), -float("inf")
    index = torch.randint(10, 20, (3,), generator=g)

    def rank(exchange, a, b):
        more = {"vocab_start": a, "vocab_size": 20} if call.takes_ids else {}
        leaves = [x[:, a:b].clone().requires_grad_() for x in (s, t)][: call.sides]
        values = call(*leaves, index=index, exchange=exchange, **more)
        return [v.detach() for v in values], torch.autograd.grad([v.sum() for v in values], leaves)

    whole = call(s, t, index=index)
    for values, grads in run_sharded(rank, [(0, 10), (10, 20)]):
        for value, right in zip(values, whole, strict=True):
            assert torch.equal(value, right)
        assert all(g.isfinite().all() for g in grads)


def test_ranks_that_part_ways_are_found():
    def different(exchange, start, stop):
        x = torch.zeros(2)
        return exchange.gather(x) if exchange.rank else exchange.sum(x)

    with pytest.raises(AssertionError, match="different calls"):
        run_sharded(different, [(0, 1), (1, 2)])

    def alone(exchange, start, stop):
        return exchange.rank or exchange.sum(torch.zeros(2))

    with pytest.raises(threading.BrokenBarrierError):
        run_sharded(alone, [(0, 1), (1, 2)], limit=0.2)

    def fails(exchange, start, stop):
        if exchange.rank == 1:
            raise ValueError("only here")
        return exchange.sum(torch.zeros(2))

    with pytest.raises(ValueError, match="only here") as info:
        run_sharded(fails, [(0, 1), (1, 2)])
    assert info.value.__notes__ == ["raised on 1 of 2 ranks"]


def test_the_rule_sees_what_is_wrong():
    truth = torch.tensor([1.0, float("nan"), float("inf"), 2.0], dtype=torch.float64)
    eager = truth.float() + 1e-6
    assert_no_worse(truth.float() - 1.5e-6, eager, truth)
    for bad in (
        torch.tensor([1.0 + 4e-6, float("nan"), float("inf"), 2.0]),
        torch.tensor([1.0, 0.0, float("inf"), 2.0]),
        torch.tensor([1.0, float("nan"), -float("inf"), 2.0]),
        torch.tensor([1.0, float("nan"), float("inf"), float("nan")]),
        truth.float()[None],
    ):
        with pytest.raises(AssertionError):
            assert_no_worse(bad, eager, truth)


def test_a_wrong_op_fails_its_cases():
    def naive_entropy(logits, **options):
        log_p = logits.float().log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    failed = set()
    for case in CASES:
        if case.op == "entropy":
            try:
                check_case(case, naive_entropy)
            except AssertionError:
                failed.add(case.make.__name__)
    assert {"masked", "disagreement", "undefined"} <= failed
    assert "normal" not in failed


def test_every_element_of_a_gradient(call):
    g = torch.Generator().manual_seed(5)
    s = torch.randn(2, 9_001, generator=g) * 3
    t = s + torch.randn(2, 9_001, generator=g)
    s[0, :4_000], t[0, :4_000] = -float("inf"), -float("inf")
    index = torch.randint(4_000, 9_001, (2, 2), generator=g)
    logits = [s, t][: call.sides]
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in logits]
        values = call(*leaves, index=index)
        grads = torch.autograd.grad([v.sum() for v in values], leaves)
        wide = [x.detach().double() for x in leaves]
        truths = call.true_gradients(
            *wide, upstream=[torch.ones_like(v) for v in values], index=index
        )
        call.assert_each_near(grads, truths, *wide)
        # a column of the usual size, which is far below the largest, and a masked one
        usual = truths[0][1].abs().median()
        at = (truths[0][1].abs() - usual).abs().argmin()
        for row, column, wrong in ((1, at, 1.01 * truths[0][1, at]), (0, 7, 1e-20)):
            spoilt = grads[0].clone()
            spoilt[row, column] = wrong + (0.0 if dtype == torch.float32 else 0.01 * wrong)
            with pytest.raises(AssertionError, match="an element errs"):
                call.assert_each_near([spoilt, *grads[1:]], truths, *wide)
