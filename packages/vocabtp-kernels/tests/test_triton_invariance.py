"""A row's bits on Triton: alone, among 100, sliced, strided, in each dtype; interpreted.

And that they come from the row alone: what lies around it is not used, what lies behind not read.

test_gpu_invariance.py says the same of compiled kernels, both implementations and real sizes.
"""

import ctypes
import mmap

import pytest
import torch
import triton
import triton.language as tl

import vocabtp.kernels as vk

INF, NAN = float("inf"), float("nan")
ROWS, WIDTH = 100, 150
KINDS = ["logprobs_and_entropy", "reverse_kl", "jsd"]

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def run(call, s, t, index, upstream):
    """Values and gradients, each `[N, *]`."""
    leaves = [s.detach().requires_grad_(), t.detach().requires_grad_()][: call.sides]
    with vk.backend("triton"):
        values = call(*leaves, index=index, temperature=1.3)
    lead = [
        (upstream if v.shape == upstream.shape else upstream[:, None]).expand_as(v) for v in values
    ]
    return (*values, *torch.autograd.grad(values, leaves, lead))


def same(got, want):
    for one, many in zip(got, want, strict=True):
        assert torch.equal(one, many.to(one.dtype))


@pytest.fixture(scope="module")
def rows():
    g = torch.Generator().manual_seed(3)
    s = torch.randn(ROWS, WIDTH + 2, generator=g) * 4
    t = s + torch.randn(ROWS, WIDTH + 2, generator=g)
    t[50] = s[50] * 1.0005  # JSD's exact way
    s[:, 8], t[:, 7] = -INF, -INF  # the same column of the views below
    index = torch.randint(0, 7, (ROWS, 2), generator=g)
    return s, t, index, torch.randn(ROWS, generator=g)


# an interpreted program takes 10 ms
@pytest.mark.parametrize("call", KINDS, indirect=True)
def test_row_has_the_same_bits_in_any_company(call, rows):
    s, t, index, upstream = rows
    s, t = s.bfloat16(), t.bfloat16()
    many = run(call, s[:, 1:-1], t[:, :-2], index, upstream)
    for at in (49, 50, 99):
        here = slice(at, at + 1)
        alone = [s[here, 1:-1].clone(), t[here, :-2].clone()]
        same(run(call, *alone, index[here], upstream[here]), [x[here] for x in many])
    some = slice(40, 60, 5)
    same(
        run(call, s[some, 1:-1], t[some, :-2], index[some], upstream[some]),
        [x[some] for x in many],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_has_the_bits_of_the_same_numbers_in_fp32(call, rows, dtype):
    s, t, index, upstream = (x[49:51] for x in rows)
    s, t = s.to(dtype), t.to(dtype)
    low = run(call, s[:, 1:-1], t[:, :-2], index, upstream)
    assert [x.dtype for x in low[-call.sides :]] == [dtype] * call.sides
    # contiguous here, strided there
    wide = [s.float()[:, 1:-1].clone(), t.float()[:, :-2].clone()]
    same(low, run(call, *wide, index, upstream))


@pytest.mark.parametrize("call", KINDS, indirect=True)
def test_a_row_past_element_2_to_the_31(call):
    """Rows that far apart; what lies between them, 4 GiB of nothing, is never touched."""
    stride = 2**30 + 24
    buffers = [torch.empty(2 * stride + 40, dtype=torch.bfloat16) for _ in range(2)]
    sides = [x.as_strided((3, 40), (stride, 1)) for x in buffers]
    g = torch.Generator().manual_seed(6)
    for side in sides:
        side.copy_(torch.randn(3, 40, generator=g))
    index, upstream = torch.tensor([[0, 39]] * 3), torch.randn(3, generator=g)
    near = run(call, *[x.clone() for x in sides], index, upstream)
    same(run(call, *sides, index, upstream), near)


def test_what_lies_outside_the_view_changes_nothing(call):
    buffers = [torch.full((3, 40), NAN) for _ in range(2)]
    sides = [b[:, 5:25] for b in buffers]
    for seed, (buffer, side) in enumerate(zip(buffers, sides, strict=True)):
        buffer[:, 25:] = INF
        side.copy_(torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)))
    index = torch.tensor([[0, 19]] * 3)
    got = run(call, *sides, index, torch.ones(3))
    want = run(call, *[x.clone() for x in sides], index, torch.ones(3))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def end_of_a_page(x):
    """A copy of `x` that ends with a page, and what asks for the pages around it and that one.

    A page that nobody has read or written is not in memory.
    """
    page = mmap.PAGESIZE
    room = mmap.mmap(-1, 3 * page)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(room, dtype=x.dtype)
    stop = 2 * page // x.element_size()
    view = memory[stop - x.numel() : stop].view(x.shape)

    def there():
        found = (ctypes.c_ubyte * 3)()
        base = ctypes.c_void_p(memory.data_ptr())
        assert ctypes.CDLL(None).mincore(base, ctypes.c_size_t(3 * page), found) == 0
        return [x & 1 for x in found]

    assert there() == [0, 0, 0]
    return view.copy_(x), there


# three whole steps and no more, or one column more: rows begin at a line, or anywhere
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 768), (torch.float32, 769), (torch.bfloat16, 769)], ids=str
)
@pytest.mark.parametrize("call", KINDS, indirect=True)
def test_memory_behind_the_view_is_not_read(call, width, dtype, small):
    g = torch.Generator().manual_seed(6)
    sides = [torch.randn(1, width, generator=g).to(dtype) for _ in range(2)]
    placed, there = zip(*map(end_of_a_page, sides), strict=True)
    got = run(call, *placed, torch.tensor([[0, width - 1]]), torch.ones(1))
    assert all(x.isfinite().all() for x in got)
    assert [ask() for ask in there] == [[0, 1, 0]] * 2


@triton.jit
def copy_kernel(x_ptr, out_ptr, read, written):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at, mask=at < read, other=0.0)
    tl.store(out_ptr + at, x, mask=at < written)


@pytest.mark.parametrize(("read", "written"), [(9, 8), (8, 9)])
def test_the_interpreter_refuses_what_is_in_none_of_the_tensors(read, written):
    """So every interpreted test is one of addresses too."""
    from vocabtp.kernels._triton import launch

    x, out = torch.zeros(16)[:8], torch.zeros(16)[:8]
    launch.run(copy_kernel, 1, x.device, x, out, 8, 8)
    with pytest.raises(Exception, match=r"IndexError.*are in none of"):
        launch.run(copy_kernel, 1, x.device, x, out, read, written)
