"""Every op in a CUDA graph, forward and backward, and without a synchronization.

What a graph has to say about ids is in test_ids_gpu.py.
"""

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels.testing import OPS

INF, NAN = float("inf"), float("nan")
ROWS, WIDTH = 12, 20_001

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    """The device, or None for a device without graphs."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    vk.check_ids()
    yield found if found.type == "cuda" else None
    vk.check_ids()


# an op, and which sides want a gradient
EVERYTHING = pytest.mark.parametrize(
    ("call", "needed"),
    [
        (op, needed)
        for op, (function, _) in OPS.items()
        for needed in ((True, False), (False, True), (True, True))
        if function in ("kl_div", "jsd") or needed == (True, False)
    ],
    indirect=["call"],
)


def static(device, dtype):
    """Memory that a graph reads: two sides, ids, upstream gradients."""
    sides = [torch.zeros(ROWS, WIDTH + 1, dtype=dtype, device=device) for _ in range(2)]
    index = torch.zeros(ROWS, 3, dtype=torch.int64, device=device)
    return [*sides, index, torch.zeros(ROWS, device=device)]


def fill(inputs, seed):
    """New numbers in the same memory; each time other rows are special."""
    s, t, index, upstream = inputs
    g = torch.Generator(s.device).manual_seed(seed)
    s.copy_(torch.randn(s.shape, generator=g, device=s.device) * 3)
    noise = torch.randn(s.shape, generator=g, device=s.device)
    t.copy_(s.float() + noise * (1e-3 if seed % 2 else 1.0))
    index.copy_(torch.randint(0, WIDTH, index.shape, generator=g, device=s.device))
    upstream.copy_(torch.randn(upstream.shape, generator=g, device=s.device))
    rows = [(7 * seed + k) % ROWS for k in range(6)]
    s[rows[0], :100], t[rows[0], 50:120] = -INF, -INF
    s[rows[1]] = -INF
    t[rows[2], 5] = NAN
    upstream[rows[3]] = 0.0
    s[rows[3], 9] = INF
    index[rows[4], 1] = -100
    t[rows[5]] = -INF


def run(call, inputs, needed):
    s, t, index, upstream = inputs
    sides = [s[:, :-1], t[:, 1:]][: call.sides]
    leaves = [x.detach().requires_grad_(n) for x, n in zip(sides, needed, strict=False)]
    values = call(*leaves, index=index)
    lead = [(upstream if v.dim() == 1 else upstream[:, None]).expand_as(v) for v in values]
    grads = torch.autograd.grad(values, [x for x in leaves if x.requires_grad], lead)
    return [x.detach() for x in (*values, *grads)]


def bits(x):
    # NaN is what differs from itself
    return x.float().nan_to_num(nan=-12345.0, posinf=INF, neginf=-INF)


@EVERYTHING
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_replay_has_the_bits_of_a_call(call, needed, dtype, backend, cuda):
    if cuda is None:
        return
    inputs = static(cuda, dtype)
    fill(inputs, 0)
    with vk.backend(backend):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(call, inputs, needed)
        torch.cuda.current_stream().wait_stream(stream)
        vk.check_ids()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(call, inputs, needed)
        seen = []
        for seed in (1, 2, 3):
            fill(inputs, seed)
            graph.replay()
            replayed = [x.clone() for x in captured]
            for got, want in zip(replayed, run(call, inputs, needed), strict=True):
                assert torch.equal(bits(got), bits(want))
            seen.append(replayed[0])
    # a graph that computed nothing would leave what was there
    assert not torch.equal(bits(seen[0]), bits(seen[1]))
    assert not torch.equal(bits(seen[1]), bits(seen[2]))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@EVERYTHING
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_a_call_by_itself_synchronizes_nothing(call, needed, backend, cuda, waits):
    """With no ids before it that it would have to wait for."""
    if cuda is None:
        return
    inputs = static(cuda, torch.bfloat16)
    fill(inputs, 0)
    with vk.backend(backend):
        run(call, inputs, needed)
        vk.check_ids()
        torch.cuda.synchronize()
        waits.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(call, inputs, needed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not waits
