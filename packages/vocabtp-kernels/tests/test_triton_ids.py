"""Ids in the Triton kernels under the interpreter: what is asked, ignored, elsewhere and bad."""

from functools import partial

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference
from vocabtp.kernels.testing import run_sharded

NAN = float("nan")

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    vk.check_ids()


@pytest.fixture
def few(monkeypatch):
    """Programs of so few ids that 40 are several of them."""
    from vocabtp.kernels._triton import tokens

    monkeypatch.setattr(tokens, "_IDS", 16)
    monkeypatch.setattr(tokens, "_IDS_OF_ROW", 16)


def logits(rows=3, width=70):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 3


def both(call, x, *upstream):
    """Values and gradient of a call in either implementation."""
    results = []
    for name in ("triton", "eager"):
        leaf = x.clone().requires_grad_()
        with vk.backend(name):
            out = call(leaf)
        out = out if isinstance(out, tuple) else (out,)
        (grad,) = torch.autograd.grad(out, leaf, upstream or [torch.ones_like(v) for v in out])
        results.append((*out, grad))
    return zip(*results, strict=True)


def same(pairs):
    for mine, yardstick in pairs:
        torch.testing.assert_close(mine, yardstick, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_ids_of_every_dtype_and_layout(dtype):
    x = logits()
    ids = (torch.arange(12, dtype=dtype) % 70).view(4, 3)
    for index in (ids.t(), ids.t()[:, 1:], ids[0], ids[:1].t().expand(3, 4)):
        same(both(lambda leaf, index=index: vk.logprobs(leaf, index), x))
    x = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0))
    many = (torch.arange(48, dtype=torch.int64) * 5 % 70).to(dtype).view(2, 3, 4, 2)
    for index in (
        many[..., 0],
        many[:, :, 1:3, 1],
        many.transpose(0, 2)[:2, :, :, 0],
        many[..., 1, 0],
    ):
        same(both(lambda leaf, index=index: vk.logprobs_and_entropy(leaf, index), x))


def test_ids_are_an_input_that_the_backward_reads_again():
    """As torch's own ops do; a copy would cost K numbers a row."""
    x, ids = logits().requires_grad_(), torch.tensor([3, 4, 5])
    for name in ("triton", "eager"):
        with vk.backend(name):
            value = vk.logprobs(x, ids)
            ids += 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value.sum().backward()


@pytest.mark.parametrize("ignore", [-100, 7, 2**40])
def test_what_is_ignored(ignore):
    x = logits()
    x[0, 5], x[1] = NAN, -float("inf")
    ids = torch.tensor([[ignore, ignore], [ignore, 3], [3, ignore]])
    call = vk.logprobs_and_entropy
    same(both(lambda leaf: call(leaf, ids, ignore_index=ignore), x))
    # nothing asks of the first row, whose NaN then stays where it is
    with vk.backend("triton"):
        leaf = x.requires_grad_()
        vk.logprobs(leaf, ids, ignore_index=ignore).sum().backward()
    assert (leaf.grad[:2] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("ignore", [2**40 + 3, 3 - 2**33])
def test_an_ignored_id_that_ends_like_a_token(ignore, backend):
    x = logits()
    ids = torch.tensor([[3, ignore, 3], [ignore, ignore, 4], [ignore, 3, 3]])
    up = torch.tensor([[1.0, 5.0, 2.0], [7.0, NAN, 1.0], [NAN, 1.0, 0.5]])
    leaf = x.clone().requires_grad_()
    with vk.backend(backend):
        vk.logprobs(leaf, ids, ignore_index=ignore).backward(up)
    tokens = ids.where(ids != ignore, -100)
    asked = [up.where(ids != ignore, 0.0)]
    (right,) = reference.gradients(reference.logprobs, [x], asked, index=tokens)
    torch.testing.assert_close(leaf.grad.double(), right, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bad", [70, -1, 2**40, -(2**62)])
def test_a_bad_id_in_any_tile_of_ids(bad, few):
    ids = torch.zeros(3, 40, dtype=torch.int64)
    ids[1, :20] = -100
    ids[1, 30], ids[1, 31], ids[1, 35] = bad, 99, 98
    x = logits()
    with vk.backend("triton"), pytest.raises(ValueError, match=r"position \[1\]; 1 of 3") as info:
        vk.logprobs(x, ids)
    assert (f"got {bad} " in str(info.value)) == (abs(bad) < 2**24)
    call = vk.logprobs_and_entropy

    def later(leaf, at, many=4):
        out = call(leaf, ids[:, at : at + many], validate_ids=False)
        with pytest.raises(ValueError, match="1 of 3 rows"):
            vk.check_ids()
        return out

    up = torch.ones(3, 4)
    up[1] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    for at in (28, 29):
        # NaN only where a gradient asks for the row
        same(both(lambda leaf, at=at: later(leaf, at), x, up, torch.zeros(3)))
        same(both(lambda leaf, at=at: later(leaf, at), x, up * (up[:, :1] != 0), torch.ones(3)))
    # ids of the last tile alone
    up = torch.zeros(3, 40)
    up[:, 36:] = 1.0
    same(both(lambda leaf: later(leaf, 0, 40), x, up, torch.zeros(3)))


def test_many_ids_and_upstream_of_any_stride(few):
    x = logits(2)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 70, (2, 40), generator=g)
    ids[0, ::3] = -100
    up = torch.randn(40, 4, generator=g)
    for upstream in (up[:, :2].t(), up[:, ::2].t(), up[:1, :1].expand(2, 40)):
        same(both(lambda leaf: vk.logprobs(leaf, ids), x, upstream))
    one = ids[:, :1]
    for upstream in (up[:2, 2:3], up[:1, :1].expand(2, 1)):
        same(both(lambda leaf: vk.logprobs_and_entropy(leaf, one), x, upstream, up[3:5, 0]))
    leaf = x.requires_grad_()
    with vk.backend("triton"):
        vk.logprobs(leaf, ids).backward(up[:, :2].t())
    (right,) = reference.gradients(reference.logprobs, [x.detach()], [up[:, :2].t()], index=ids)
    torch.testing.assert_close(leaf.grad.double(), right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("at_once", [1024, 16])
@pytest.mark.parametrize("ids", [1, 3, 40])
def test_ids_that_repeat(ids, at_once, small, monkeypatch):
    from vocabtp.kernels._triton import tokens

    monkeypatch.setattr(tokens, "_IDS", min(at_once, 256))
    monkeypatch.setattr(tokens, "_IDS_OF_ROW", at_once)
    g = torch.Generator().manual_seed(5)
    x = (torch.randn(2, 200, generator=g) * 3).bfloat16()
    index = torch.randint(0, 9, (2, ids), generator=g)
    index[1, -1] = -100
    up = torch.randn(2, ids, generator=g)
    leaf = x.clone().requires_grad_()
    with vk.backend("triton"):
        value = vk.logprobs(leaf, index)
    value.backward(up)
    right = reference.logprobs(x, index)
    torch.testing.assert_close(value.double(), right, rtol=1e-6, atol=1e-6)
    (truth,) = reference.gradients(reference.logprobs, [x], [up], index=index)
    # all terms meet in fp32, so that one rounding is left
    torch.testing.assert_close(leaf.grad.double(), truth, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("asked", [slice(16), slice(20, 24), slice(32, 40)])
@pytest.mark.parametrize("op", [vk.logprobs, vk.logprobs_and_entropy])
def test_ids_of_one_tile_that_alone_are_asked_for(op, asked, few):
    """A row has a gradient if any of its ids asks for one, in whichever tile of ids."""
    x = logits(2)
    ids = torch.randint(0, 70, (2, 40), generator=torch.Generator().manual_seed(3))
    up = torch.zeros(2, 40)
    up[:, asked] = torch.linspace(0.5, 1.5, len(range(40)[asked]))
    upstream = [up] if op is vk.logprobs else [up, torch.zeros(2)]
    leaf = x.clone().requires_grad_()
    with vk.backend("triton"):
        out = op(leaf, ids)
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    (right,) = reference.gradients(reference.logprobs, [x], [up], index=ids)
    torch.testing.assert_close(grad.double(), right, rtol=2e-5, atol=2e-5)
    assert (right.abs().amax(1) > 0.1).all()


def test_gradients_of_many_ids_have_the_same_bits_in_any_company():
    x, g = logits(5), torch.Generator().manual_seed(2)
    ids = torch.randint(0, 70, (5, 40), generator=g)  # most of them given more than once
    up = torch.randn(5, 40, generator=g)

    def gradient(rows):
        leaf = x[rows].clone().requires_grad_()
        with vk.backend("triton"):
            vk.logprobs(leaf, ids[rows]).backward(up[rows])
        return leaf.grad

    together = gradient(slice(5))
    for row in range(5):
        assert torch.equal(gradient(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_many_ids_as_are_seen_at_once(dtype):
    """1024 of them: the last ones' numbers survive a gradient of two bytes."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(2, 2048, generator=g).to(dtype)
    ids = torch.stack([torch.randperm(2048, generator=g)[:1024] for _ in range(2)])
    ids[1, 512:] = ids[1, :512]  # each once more, far away
    up = torch.randn(2, 1024, generator=g)
    leaf = x.clone().requires_grad_()
    with vk.backend("triton"):
        vk.logprobs(leaf, ids).backward(up)
    (truth,) = reference.gradients(reference.logprobs, [x], [up], index=ids)
    torch.testing.assert_close(leaf.grad.double(), truth, rtol=2.0**-8, atol=2e-5)


@pytest.mark.parametrize("many", [1, 3])
def test_shards_and_a_bad_id_of_another_rank(many):
    x = logits()
    up = torch.randn(3, many, generator=torch.Generator().manual_seed(2))

    def rank(name, exchange, a, b):
        ids = torch.tensor([[0, 69, 30], [4, 4, -100], [69, 69, 2]])[:, :many].clone()
        if exchange.rank == 1:
            ids[2, -1] = 70
        leaf = x[:, a:b].clone().requires_grad_()
        more = {"exchange": exchange, "vocab_start": a, "vocab_size": 70}
        with vk.backend(name):
            lp, h = vk.logprobs_and_entropy(leaf, ids, validate_ids=False, **more)
        (grad,) = torch.autograd.grad([lp, h], leaf, [up, up[:, 0]])
        return lp, h, grad

    results = []
    for name in ("triton", "eager"):
        results.append(run_sharded(partial(rank, name), [(0, 0), (0, 33), (33, 70)]))
        with pytest.raises(ValueError, match=r"got 70 at position \[2\] on rank 1; 1 of 3 rows"):
            vk.check_ids()
    for one, other in zip(*results, strict=True):
        assert one[0][2].isnan().all()
        assert one[0][:2].isfinite().all()
        same(zip(one, other, strict=True))


@pytest.mark.parametrize("triton", ["token_stats", "finish_tokens", "token_grad"])
def test_a_call_may_change_its_implementation(triton, monkeypatch):
    """As after a kernel that does not compile: one step of Triton, the others eager."""
    from vocabtp.kernels import _backend, _calls, _eager, _triton
    from vocabtp.kernels._triton import launch

    for name, value in (("TILE", 16), ("STEP", 64), ("_LEAST_STEPS", 2)):
        monkeypatch.setattr(launch, name, value)
    x = logits(3, 300)
    assert launch.segments(300).number > 1
    ids = torch.tensor([[299, 0, 299], [300, -100, 1], [5, 6, -100]])

    class Mixed:
        def __getattr__(self, name):
            return getattr(_triton if name == triton else _eager, name)

    def run(implementation):
        choice = _backend.Choice(implementation, "mixed", "a test")
        monkeypatch.setattr(_calls, "choose", lambda caller, *x: choice)
        leaf = x.clone().requires_grad_()
        lp, h = vk.logprobs_and_entropy(leaf, ids, validate_ids=False)
        with pytest.raises(ValueError, match=r"got 300 at position \[1\]"):
            vk.check_ids()
        return lp, h, *torch.autograd.grad(lp.sum() + h.sum(), leaf)

    same(zip(run(Mixed()), run(_eager), strict=True))


def test_a_forward_is_three_launches_and_a_backward_one(monkeypatch):
    from vocabtp.kernels._triton import launch

    started = []
    run = launch.run

    def counted(kernel, *args, **options):
        started.append(kernel.__name__)
        run(kernel, *args, **options)

    monkeypatch.setattr(launch, "run", counted)
    x = logits().requires_grad_()
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for call, forward in (
        (lambda: vk.entropy(x), 2),
        (lambda: vk.logprobs(x, ids[:, :1]), 3),
        (lambda: vk.logprobs(x, ids), 3),
        (lambda: vk.logprobs_and_entropy(x, ids[:, 0]), 3),
    ):
        with vk.backend("triton"):
            out = call()
        assert len(started) == forward
        started.clear()
        sum(v.sum() for v in (out if isinstance(out, tuple) else (out,))).backward()
        assert len(started) == 1
        started.clear()
