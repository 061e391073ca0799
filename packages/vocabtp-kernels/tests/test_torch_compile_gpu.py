"""The ops inside torch.compile on an accelerator, with inductor and the Triton kernels."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import vocabtp.kernels as vk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
]

V = 32_000


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def inputs(rows, device, dtype=torch.bfloat16):
    g = torch.Generator(device).manual_seed(rows)
    sides = torch.randn(2, 2, rows, V, generator=g, device=device) * 3
    ids = torch.randint(V, (2, rows), generator=g, device=device)
    return sides.to(dtype), ids


def run(function, sides, ids):
    leaves = [x.detach().clone().requires_grad_() for x in sides]
    values = function(*leaves, ids)
    upstream = [torch.linspace(0, 1, v.numel(), device=v.device).view(v.shape) for v in values]
    grads = torch.autograd.grad(values, leaves, upstream, allow_unused=True)
    return [x.clone() for x in (*values, *grads) if x is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_graph_no_recompile_and_the_same_bits(call, device, dtype):
    def function(student, teacher, ids):
        # neighbours for inductor to work on
        values = call(student, teacher, index=ids)
        return [v * 2 for v in values]

    counter = CompileCounterWithBackend("inductor")
    inside = torch.compile(function, backend=counter, fullgraph=True)
    for rows in (3, 5, 8, 13, 64):
        sides, ids = inputs(rows, device, dtype)
        for x, y in zip(run(inside, sides, ids), run(function, sides, ids), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2
    vk.check_ids()


# the compiler captures an empty graph on purpose, to have a memory pool
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("call", ["reverse_kl", "jsd_clip", "entropy", "logprobs"], indirect=True)
def test_cuda_graphs_of_the_compiler(call, device):
    def function(student, teacher, ids):
        return [v * 2 for v in call(student, teacher, index=ids)]

    inside = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for step in range(5):  # warms up, records, replays
        sides, ids = inputs(16, device)
        sides = sides + step
        torch.compiler.cudagraph_mark_step_begin()
        for x, y in zip(run(inside, sides, ids), run(function, sides, ids), strict=True):
            assert torch.equal(x, y)
    vk.check_ids()


def test_a_bad_id_is_reported_by_the_next_op(device):
    inside = torch.compile(vk.logprobs, fullgraph=True)
    logits = torch.randn(4, V, device=device)
    ids = torch.tensor([1, 2, V, 3], device=device)
    assert inside(logits, ids).isnan().tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=f"^logprobs: an id must be in .* got {V} at position"):
        torch.compile(vk.entropy, fullgraph=True)(logits)
    vk.check_ids()


def test_sharded_ops_keep_their_order(device):
    calls = []

    class OneRank:
        def gather(self, x):
            calls.append(len(x))
            return x.unsqueeze(0)

        def sum(self, x):
            return x

    exchange = OneRank()

    def function(p, q):
        vk.kl_div(p, q, exchange=exchange)  # nobody uses it
        last = vk.jsd(p * 2, q, exchange=exchange)
        first = vk.kl_div(p, q, exchange=exchange)
        return first + 1, last

    sides, _ = inputs(4, device)
    for x, y in zip(torch.compile(function, fullgraph=True)(*sides), function(*sides), strict=True):
        assert torch.equal(x, y)
    assert calls == [6, 4, 3, 6] * 2
