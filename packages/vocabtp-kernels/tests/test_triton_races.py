"""What programs of the gradient of many ids do to memory, and in which order.

The interpreter runs a program as one thread, so that no race changes what it computes: accesses
are taken down instead, and two that meet in one place without a barrier between them are a race.
"""

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import reference

pytestmark = pytest.mark.usefixtures("interpreter")

# a small program, a large one, and more ids than one sees at once
MANY = pytest.mark.parametrize(
    ("ids", "dtype"), [(13, torch.bfloat16), (40, torch.float32), (100, torch.bfloat16)]
)


class Memory:
    """Accesses of a launch by address: the program, the barriers before, the number, the value."""

    def __init__(self, patch):
        from triton.runtime import interpreter

        self.launches = self.program = self.barriers = self.number = 0
        self.turned = False
        self.races = set()
        self._stored, self._loaded = {}, {}
        builder = interpreter.InterpreterBuilder
        load, store, place = (
            getattr(builder, name)
            for name in ("create_masked_load", "create_masked_store", "set_grid_idx")
        )

        def at_place(made, x, y, z):
            self.program = x
            place(made, x, y, z)

        def loaded(made, ptrs, mask, *rest):
            self.number += 1
            for at in ptrs.data[mask.data.astype(bool)].tolist():
                self._meet(self._stored.get(at), "store, load")
                self._loaded[at] = (self.program, self.barriers, self.number, None)
            return load(made, ptrs, mask, *rest)

        def stored(made, ptrs, value, mask, *rest):
            self.number += 1
            handle = interpreter.TensorHandle
            if self.turned:
                # of one store's lanes any may be the last in a place
                ptrs, value, mask = (handle(x.data[::-1], x.dtype) for x in (ptrs, value, mask))
            bits = value.data.view(f"u{value.data.itemsize}")
            here = mask.data.astype(bool)
            for at, what in zip(ptrs.data[here].tolist(), bits[here].tolist(), strict=True):
                self._meet(self._stored.get(at), "store, store", what)
                self._meet(self._loaded.get(at), "load, store")
                self._stored[at] = (self.program, self.barriers, self.number, what)
            return store(made, ptrs, value, mask, *rest)

        patch.setattr(builder, "set_grid_idx", at_place)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        patch.setattr(builder, "create_barrier", lambda made: self._barrier())

    def _barrier(self):
        self.barriers += 1

    def _meet(self, before, what, value=None):
        if before is None or before[2] == self.number:
            return
        program, barriers, _, old = before
        if program != self.program:
            self.races.add(f"two programs: {what}")
        elif barriers == self.barriers and (value is None or value != old):
            self.races.add(what)

    def forget(self):
        """Between two launches."""
        self.launches += 1
        self._stored.clear()
        self._loaded.clear()


@pytest.fixture
def memory(small, monkeypatch):
    """Of programs of 512 columns and 16 ids at once, or 64 of a larger one."""
    from vocabtp.kernels._triton import tokens

    memory, run = Memory(monkeypatch), small.run

    def launched(*args, **options):
        memory.forget()
        run(*args, **options)

    monkeypatch.setattr(small, "run", launched)
    monkeypatch.setattr(tokens, "_IDS", 16)
    monkeypatch.setattr(tokens, "_IDS_OF_ROW", 64)
    return memory


def gradient(memory, ids, dtype, turned=False):
    """The gradient of two rows that take two programs each, begin anywhere, and the right one."""
    g = torch.Generator().manual_seed(ids)
    x = (torch.randn(2, 700, generator=g) * 3).to(dtype)[:, 1:-2]
    # some alone and some not; the first and the last columns are in no whole eight
    index = torch.randint(0, 697, (2, ids), generator=g)
    index[:, ::3] = torch.tensor([0, 696, 300, 520])[torch.arange(len(index[0, ::3])) % 4]
    up = torch.randn(2, ids, generator=g)
    (truth,) = reference.gradients(reference.logprobs, [x], [up], index=index)
    leaf = x.detach().requires_grad_()
    with vk.backend("triton"):
        value = vk.logprobs(leaf, index)
        vk.check_ids()
        memory.launches, memory.turned, memory.races = 0, turned, set()
        (grad,) = torch.autograd.grad(value, leaf, up)
    return grad, truth


@pytest.mark.parametrize("turned", [False, True])
@MANY
def test_one_launch(ids, dtype, turned, memory):
    grad, truth = gradient(memory, ids, dtype, turned)
    assert (memory.launches, memory.races) == (1, set())
    assert memory.barriers
    torch.testing.assert_close(grad.double(), truth, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@MANY
def test_a_launch_each_where_no_barrier_orders_memory(ids, dtype, turned, memory, monkeypatch):
    """The last one's barriers count here: on a device, a minimum of all lanes is one."""
    one, _ = gradient(memory, ids, dtype)
    monkeypatch.setattr("vocabtp.kernels._triton.launch.ordering_barrier", lambda device: False)
    each, _ = gradient(memory, ids, dtype, turned)
    assert (memory.launches, memory.races) == (3 if ids <= 64 else 2, set())
    assert torch.equal(one, each)
