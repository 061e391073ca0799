"""fp32 temporaries stay under 64 MiB whatever the number of rows."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import vocabtp.kernels as vk
from vocabtp.kernels._eager import tiles

LIMIT = 64 << 20


class Live(TorchDispatchMode):
    """Bytes of storages that were made inside and are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.users, self.now, self.peak = {}, 0, 0

    def _leave(self, key, size):
        self.users[key] -= 1
        if not self.users[key]:
            self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not torch.is_tensor(x):
                continue
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in known and not self.users.get(key):
                continue
            if not self.users.get(key):
                self.now += size
                self.peak = max(self.peak, self.now)
            self.users[key] = self.users.get(key, 0) + 1
            weakref.finalize(x, self._leave, key, size)
        return out


OPS = {
    "logprobs": lambda s, t, i: vk.logprobs(s, i),
    "both": lambda s, t, i: sum(x.sum() for x in vk.logprobs_and_entropy(s, i)),
    "entropy": lambda s, t, i: vk.entropy(s),
    "kl": lambda s, t, i: vk.kl_div(s, t, temperature=2.0),
    "kl_clip": lambda s, t, i: vk.kl_div(s, t, reverse=True, pointwise_clip=0.1),
    "ids": lambda s, t, i: vk.logprobs(s, i),
    "kl_cold": lambda s, t, i: vk.kl_div(s, t, temperature=0.5),
    "kl_one": lambda s, t, i: vk.kl_div(s.detach(), t),
    "jsd": lambda s, t, i: vk.jsd(s, t),
    "jsd_clip": lambda s, t, i: vk.jsd(s, t, pointwise_clip=0.1),
    "jsd_student": lambda s, t, i: vk.jsd(s, t.detach()),
    "jsd_teacher": lambda s, t, i: vk.jsd(s.detach(), t),
}


def test_an_accelerators_budget_leaves_room_for_statistics():
    assert tiles._BUDGET_CPU <= tiles._BUDGET <= LIMIT * 7 // 8


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("rows", "cols"), [(500, 4000), (16_000, 100)])
def test_working_copies_are_counted_to_the_byte(name, rows, cols, monkeypatch):
    """The budget may be most of the limit."""
    budget = 8 << 20
    monkeypatch.setattr(tiles, "_BUDGET_CPU", budget)
    s = torch.randn(rows, cols).bfloat16().requires_grad_()
    t = torch.randn(rows, cols).bfloat16().requires_grad_()
    index = torch.randint(0, cols, (rows, cols // 16) if name == "ids" else (rows,))
    gc.collect()
    with Live() as live, torch.no_grad():
        OPS[name](s, t, index)
    forward = live.peak - 4 * index.numel()
    with Live() as live:
        OPS[name](s, t, index).sum().backward()
    grads = sum(x.grad.nbytes for x in (s, t) if x.grad is not None)
    peak = max(forward, live.peak - grads - 4 * index.numel())
    # statistics come on top
    assert budget / 2 < peak <= budget + rows * 64


@pytest.mark.parametrize("name", OPS)
def test_temporaries_do_not_grow_with_rows(name, monkeypatch):
    budget = 4 << 20
    monkeypatch.setattr(tiles, "_BUDGET_CPU", budget)
    peaks = []
    # both are more than one chunk, also of the ops with the fewest working copies
    for rows in (300, 600):
        s = torch.randn(rows, 2000).bfloat16().requires_grad_()
        t = torch.randn(rows, 2000).bfloat16().requires_grad_()
        index = torch.zeros(rows, dtype=torch.int64)
        gc.collect()
        with Live() as live:
            OPS[name](s, t, index).sum().backward()
        grads = sum(x.grad.nbytes for x in (s, t) if x.grad is not None)
        peaks.append(live.peak - grads)
    # at most the budget, and statistics
    assert budget / 4 < peaks[0]
    assert peaks[1] <= budget + 600 * 256
    assert peaks[1] - peaks[0] < 300 * 256


class OneRank:
    """An exchange that reduces in place, as one over a process group does."""

    def gather(self, x):
        return x.unsqueeze(0)

    def sum(self, x):
        return x


@pytest.mark.parametrize("op", [vk.logprobs, vk.logprobs_and_entropy])
@pytest.mark.parametrize("exchange", [None, OneRank()], ids=["whole", "sharded"])
@pytest.mark.parametrize("cut", [False, True])
def test_ids_cost_triton_no_memory_of_their_own(op, exchange, cut, interpreter, monkeypatch):
    """Besides inputs, outputs and gradients a row has at most 64 fp32 numbers."""
    from vocabtp.kernels._triton import launch

    run = launch.run

    def uncounted(*args, **options):
        # the interpreter works on copies of what a kernel is given
        with _disable_current_modes():
            run(*args, **options)

    monkeypatch.setattr(launch, "run", uncounted)
    rows, number = 4, 96
    s = torch.randn(2, rows // 2, 500).requires_grad_()
    index = torch.randint(0, 500, (2, rows // 2 + cut, number))[:, cut:]
    options = {} if exchange is None else {"exchange": exchange}
    upstream = [torch.ones(index.shape), torch.ones(index.shape[:2])]
    gc.collect()
    with vk.backend("triton"), Live() as live:
        out = op(s, index, validate_ids=False, **options)
        out = out if isinstance(out, tuple) else (out,)
        held = sum(x.nbytes for x in out)
        assert live.peak - held <= rows * 64 * 4
        (grad,) = torch.autograd.grad(out, s, upstream[: len(out)])
        assert live.peak - held - grad.nbytes <= rows * 64 * 4
