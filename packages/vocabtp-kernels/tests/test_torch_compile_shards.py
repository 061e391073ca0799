"""Sharded calls inside torch.compile: exchanges, and the order of what is asked of them."""

import gc
import weakref

import pytest
import torch

import vocabtp.kernels as vk
from compiled_calls import ONE_OF_EACH, assert_same, compiled, inputs, run

# inductor imports parts of torch that torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class OneRank:
    """An exchange that a user might write, and what was asked of it."""

    def __init__(self):
        self.calls = []

    def gather(self, x):
        self.calls.append(("gather", len(x)))
        return x.unsqueeze(0)

    def sum(self, x):
        self.calls.append(("sum", len(x)))
        return x.clone()


@ONE_OF_EACH
def test_an_exchange_of_ones_own(call):
    own, expected = OneRank(), OneRank()
    sides, ids = inputs(4)
    inside, counter = compiled(lambda p, q, exchange: call(p, q, index=ids, exchange=exchange))
    got = run(lambda p, q: inside(p, q, own), sides)
    assert_same(got, run(lambda p, q: call(p, q, index=ids, exchange=expected), sides))
    assert own.calls == expected.calls != []
    other = OneRank()
    run(lambda p, q: inside(p, q, other), sides)
    assert other.calls == own.calls == expected.calls
    assert counter.frame_count == 2  # another exchange is another graph


def test_an_exchange_that_was_compiled_with_is_kept():
    sides, _ = inputs(4)
    inside, _ = compiled(lambda p, q: vk.kl_div(p, q, exchange=exchange))
    exchange = OneRank()
    inside(*sides)
    gone = weakref.ref(exchange)
    exchange = None
    torch._dynamo.reset()
    gc.collect()
    # else a new one could get its identity, and its place
    assert gone() is not None


def test_exchanges_by_name_are_made_inside_and_not_traced_again():
    made = []

    class Named(OneRank):
        def __init__(self, name):
            super().__init__()
            self.compiled_name = "test_named:" + name

    def find(name):
        made.append((name, Named(name)))
        return made[-1][1]

    vk.name_exchanges("test_named", find)
    sides, _ = inputs(4)
    inside, counter = compiled(lambda p, q, name: vk.kl_div(p, q, exchange=Named(name)))
    for _ in range(2):
        assert_same([[inside(*sides, "one")]], [[vk.kl_div(*sides)]])
    assert [(name, e.calls) for name, e in made] == [("one", [("gather", 6)])] * 2
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match=r"^name_exchanges: kind must be"):
        vk.name_exchanges("a:b", find)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sharded_calls_are_kept_in_order_whatever_becomes_of_their_results(backend):
    exchange = OneRank()

    def function(p, q):
        vk.kl_div(p, q, exchange=exchange)  # nobody uses it
        last = vk.jsd(p, q, exchange=exchange)
        first = vk.kl_div(p, q, exchange=exchange)  # nothing tells it from the unused one
        again = vk.kl_div(p, q, exchange=exchange)
        return again, last, first

    inside, _ = compiled(function, backend)
    sides, _ = inputs(3)
    inside(*sides)
    kl, jsd = [("gather", 6)], [("gather", 4), ("gather", 3)]
    assert exchange.calls == kl + jsd + kl + kl
