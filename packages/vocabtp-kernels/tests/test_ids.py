"""Ids: shapes, what is ignored, and how one that is no token is reported on every rank."""

import threading

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import _ids, reference
from vocabtp.kernels.testing import run_sharded

OPS = [vk.logprobs, vk.logprobs_and_entropy]
BOUNDS = [(0, 2), (2, 2), (2, 5)]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    vk.check_ids()


def logits():
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_every_integer_dtype(op, dtype):
    x = logits()
    ids = torch.arange(12, dtype=dtype).view(4, 3) % 5
    out = op(x, ids)
    value = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(value.double(), reference.logprobs(x, ids), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_shapes_of_ids(op):
    x = logits()
    for shape in ((4, 3), (4, 3, 1), (4, 3, 7), (4, 3, 0)):
        ids = torch.randint(0, 5, shape)
        out = op(x, ids)
        value = out[0] if isinstance(out, tuple) else out
        assert value.shape == shape
        torch.testing.assert_close(value.double(), reference.logprobs(x, ids), rtol=1e-6, atol=1e-6)
    assert op(x[0, 0], torch.tensor(3)) is not None
    # the leading shape wins where both readings fit
    square = torch.randn(5, 5)
    assert vk.logprobs(square, torch.zeros(5, dtype=torch.int64)).shape == (5,)
    for shape in ((4,), (3, 4), (4, 3, 5, 1), (12,), (4, 2), ()):
        with pytest.raises(ValueError, match=r"index must be \[4, 3\] or that and \[K\]"):
            op(x, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("op", OPS)
def test_ids_that_were_made_in_inference_mode(op):
    with torch.inference_mode():
        ids = torch.randint(0, 5, (4, 3, 2))
    grads = []
    for index in (ids, ids.clone()):
        x = logits().requires_grad_()
        out = op(x, index)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        grads.append(x.grad)
    assert grads[0].abs().sum() > 0
    assert torch.equal(*grads)


@pytest.mark.parametrize("op", OPS)
def test_ids_of_the_wrong_kind(op):
    x = logits()
    for bad in (torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bool), [[0]], 3, None):
        with pytest.raises(TypeError, match="index must"):
            op(x, bad)
    with pytest.raises(ValueError, match="index must be where the logits are"):
        op(x, torch.zeros(4, 3, dtype=torch.int64, device="meta"))
    for bad in (True, 1.0, torch.tensor(3), None):
        with pytest.raises(TypeError, match="ignore_index must be an integer"):
            op(x, torch.zeros(4, 3, dtype=torch.int64), ignore_index=bad)


@pytest.mark.parametrize("ignore", [-100, -1, 2, 7, 2**40])
def test_ignored_ids_have_value_zero_and_no_gradient(ignore):
    x = logits().requires_grad_()
    ids = torch.arange(12).view(4, 3) % 5
    ids[0, 0] = ids[1] = ignore
    lp, h = vk.logprobs_and_entropy(x, ids, ignore_index=ignore)
    ignored = ids == ignore
    assert (lp[ignored] == 0).all()
    assert (lp[~ignored] < 0).all()
    torch.testing.assert_close(h.double(), reference.entropy(x), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(lp.sum(), x, retain_graph=True)
    assert (grad[ignored] == 0).all()
    assert (grad[~ignored].abs().sum(-1) > 0).all()
    # a row of ignored ids keeps the gradient of its entropy
    (grad,) = torch.autograd.grad(h.sum(), x)
    right = reference.gradients(reference.entropy, [x], [torch.ones(4, 3)])[0]
    torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=1e-7)


def test_an_ignored_id_hides_a_row_without_distribution_and_a_nan():
    x = torch.tensor([[-float("inf")] * 2, [float("nan"), 0.0]], requires_grad=True)
    lp, h = vk.logprobs_and_entropy(x, torch.tensor([-100, -100]))
    assert (lp == 0).all()
    assert h.isnan().all()
    lp.sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", [5, -1, -101, 10**6, 2**40, -(2**62)])
def test_a_bad_id_is_named(op, bad):
    ids = torch.zeros(4, 3, 2, dtype=torch.int64)
    ids[2, 1, 1] = bad
    with pytest.raises(
        ValueError, match=r"an id must be in \[0, 5\) or equal ignore_index"
    ) as info:
        op(logits(), ids)
    said = str(info.value)
    assert op.__name__ in said
    assert "position [2, 1]" in said
    assert "1 of 12 rows" in said
    assert (f"got {bad} " in said) == (abs(bad) < 2**24)


def test_ids_at_both_ends_of_a_padded_vocabulary_are_columns():
    x = logits()
    assert vk.logprobs(x, torch.full((4, 3), 4)).isfinite().all()
    assert vk.logprobs(x, torch.full((4, 3), 0)).isfinite().all()


@pytest.mark.parametrize("at_fault", [0, 1, 2])
def test_every_rank_raises_for_one_ranks_bad_id(at_fault):
    x = logits()

    def rank(exchange, a, b):
        ids = torch.zeros(4, 3, dtype=torch.int64)
        if exchange.rank == at_fault:
            ids[3, 2] = 5
        try:
            vk.logprobs(x[..., a:b], ids, exchange=exchange, vocab_start=a, vocab_size=5)
        except ValueError as error:
            return str(error), exchange.calls
        return None

    results = run_sharded(rank, BOUNDS, limit=10.0)
    assert results[0] is not None
    assert results[0] == results[1] == results[2]
    said, calls = results[0]
    assert f"got 5 at position [3, 2] on rank {at_fault}" in said
    # inside the gather of the statistics: no collective of its own
    assert [kind for kind, _, _ in calls] == ["gather"]


def test_a_call_makes_the_least_exchanges():
    x = logits()
    expected = {
        vk.entropy: ["gather"],
        vk.logprobs: ["gather", "sum"],
        vk.logprobs_and_entropy: ["gather", "sum"],
        vk.kl_div: ["gather"],
        vk.jsd: ["gather", "gather"],
    }
    for op, kinds in expected.items():

        def rank(exchange, a, b, op=op):
            leaves = [x[..., a:b].clone().requires_grad_() for _ in range(2)]
            if op in OPS:
                ids = torch.zeros(4, 3, dtype=torch.int64)
                out = op(leaves[0], ids, exchange=exchange, vocab_start=a, vocab_size=5)
            else:
                out = op(*leaves[: 1 if op is vk.entropy else 2], exchange=exchange)
            forward = len(exchange.calls)
            sum(v.sum() for v in (out if isinstance(out, tuple) else (out,))).backward()
            assert len(exchange.calls) == forward
            return [kind for kind, _, _ in exchange.calls]

        assert run_sharded(rank, BOUNDS) == [kinds] * 3


def test_a_deferred_error_comes_with_the_next_call():
    x = logits().requires_grad_()
    ids = torch.zeros(4, 3, 2, dtype=torch.int64)
    ids[1, 2] = torch.tensor([7, 3])
    ids[1, 1, 0] = -100
    for follow in (
        vk.check_ids,
        lambda: vk.entropy(x),
        lambda: vk.logprobs(x, ids[..., :1] * 0),
        lambda: vk.logprobs_and_entropy(x, ids * 0),
        lambda: vk.kl_div(x, x),
        lambda: vk.jsd(x, x),
    ):
        lp, h = vk.logprobs_and_entropy(x, ids, validate_ids=False)
        # the row, not the id alone, is NaN; nothing else is
        assert lp[1, 2].isnan().all()
        assert lp.isnan().sum() == 2
        assert h.isfinite().all()
        with pytest.raises(ValueError, match=r"logprobs_and_entropy: an id .* got 7 at .*\[1, 2\]"):
            follow()
        vk.check_ids()  # said once
    (grad,) = torch.autograd.grad(lp.nansum(), x, retain_graph=True)
    assert (grad[1, 2] == 0).all()
    (grad,) = torch.autograd.grad(lp.sum(), x)
    assert grad[1, 2].isnan().all()
    assert grad.isnan().sum() == 5


def test_a_deferred_error_of_another_ranks_id_is_a_nan_here_too():
    x = logits()

    def rank(exchange, a, b):
        ids = torch.zeros(4, 3, dtype=torch.int64)
        ids[0, 0] = 5 if exchange.rank == 1 else -100
        ids[0, 1] = 5 if exchange.rank == 1 else 1
        return vk.logprobs(
            x[..., a:b], ids, exchange=exchange, vocab_start=a, vocab_size=5, validate_ids=False
        )

    one, two, three = run_sharded(rank, BOUNDS)
    with pytest.raises(ValueError, match=r"got 5 at position .* on rank 1"):
        vk.check_ids()
    assert one[0, 1].isnan()
    assert two[0, 1].isnan()
    assert three[0, 1].isnan()
    # an ignored id asks nothing, whatever the others ask
    assert one[0, 0] == 0


def test_validation_can_be_asked_for():
    ids = torch.full((4, 3), 9)
    for validate in (True, None):
        with pytest.raises(ValueError, match="got 9"):
            vk.logprobs(logits(), ids, validate_ids=validate)
    with pytest.raises(TypeError, match="validate_ids must be True or False"):
        vk.logprobs(logits(), ids, validate_ids=1)


def test_pending_errors_are_seen_from_another_thread():
    vk.logprobs(logits(), torch.full((4, 3), 9), validate_ids=False)
    caught = []

    def other():
        try:
            vk.check_ids()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert not _ids._pending


def test_a_shard_outside_of_the_vocabulary():
    x, ids = logits(), torch.zeros(4, 3, dtype=torch.int64)
    for start, size in ((1, None), (0, 4), (-1, 9), (5, 9)):
        with pytest.raises(ValueError, match="the shard must lie in the vocabulary"):
            vk.logprobs(x, ids, vocab_start=start, vocab_size=size)
    for start, size in ((1.0, None), (True, None), (0, 5.0)):
        with pytest.raises(TypeError, match="must be an integer"):
            vk.logprobs(x, ids, vocab_start=start, vocab_size=size)


def test_ids_of_an_empty_vocabulary():
    x = torch.zeros(2, 0)
    assert vk.logprobs(x, torch.tensor([-100, -100])).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"in \[0, 0\).* got 0 at position \[0\]"):
        vk.logprobs(x, torch.tensor([0, 0]))
    assert vk.entropy(x).isnan().all()
    assert vk.kl_div(x, x).isnan().all()
    assert vk.jsd(x, x).isnan().all()
