"""The losses on a shard inside torch.compile: one graph, the bits of the call outside."""

import pytest
import torch
import torch._dynamo  # the ranks are forked from a server that has it then
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import vocabtp.dist as vd
from vocabtp.dist.testing import ops, piece

VOCAB = 11
BOUNDS = {1: [(0, 11)], 2: [(0, 8), (8, 11)]}


def _inputs(rows, bounds):
    g = torch.Generator().manual_seed(rows)
    sides = torch.randn(2, 2, rows, VOCAB, generator=g)
    ids = torch.randint(VOCAB, (2, rows), generator=g)
    return [piece(x, bounds, requires_grad=True) for x in sides], ids


def _run(function, sides, ids, shard):
    values = function(*sides, ids, shard)
    return values, torch.autograd.grad(
        values, sides, [torch.ones_like(v) for v in values], allow_unused=True
    )


def _all_ops(student, teacher, ids, shard):
    """Every loss in one graph: also the order of their collectives."""
    values = []
    for op in ops().values():
        sides = [student, teacher][: op.sides]
        out = op.sharded(*sides, *([ids] if op.takes_ids else []), shard=shard, **op.options)
        values.extend(out if isinstance(out, tuple) else [out])
    return values


def _same_bits(rank, world, row_counts):
    counter = CompileCounterWithBackend("aot_eager")
    inside = torch.compile(_all_ops, backend=counter, fullgraph=True)
    bounds = BOUNDS[world][rank]
    for rows in row_counts:
        sides, ids = _inputs(rows, bounds)
        # a new shard that says the same does not compile anew
        shard = vd.VocabShard(*bounds, VOCAB, dist.group.WORLD)
        got = _run(inside, sides, ids, shard)
        expected = _run(_all_ops, sides, ids, shard)
        for x, y in zip(got[0], expected[0], strict=True):
            assert torch.equal(x, y)
        for x, y in zip(got[1], expected[1], strict=True):
            # the compiler may add up the gradients of many losses in another order
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == min(2, len(row_counts))
    return [v.tolist() for v in got[0]]


@pytest.mark.parametrize(("world", "row_counts"), [(1, [3]), (2, [3, 5, 8])])
def test_every_loss_in_one_graph(ranks, world, row_counts):
    first, *others = ranks(_same_bits, world, row_counts, limit=120.0)
    assert others == [first] * (world - 1)


def _inductor(rank, world):
    def function(student, teacher, shard):
        # nothing that inductor would have to call a C++ compiler for
        values = vd.vocab_parallel_jsd(student, teacher, shard=shard)
        return values, vd.vocab_parallel_kl_div(student, teacher, shard=shard)

    bounds = BOUNDS[world][rank]
    shard = vd.VocabShard(*bounds, VOCAB, dist.group.WORLD)
    sides, _ = _inputs(4, bounds)
    got = torch.compile(function, fullgraph=True)(*sides, shard)
    for x, y in zip(got, function(*sides, shard), strict=True):
        assert torch.equal(x, y)
    return [v.tolist() for v in got]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_inductor(ranks):
    first, second = ranks(_inductor, 2, limit=240.0)
    assert first == second


def _without_a_shard(rank, world):
    def function(student, teacher):
        group = dist.group.WORLD
        return vd.vocab_parallel_kl_div(student * 1, teacher, tp_group=group) * 1

    sides, _ = _inputs(3, BOUNDS[world][rank])
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(function, fullgraph=True, backend="eager")(*sides)
    assert "give shard=" in str(error.value)
    # with breaks in the graph it works
    got = torch.compile(function, backend="eager")(*sides)
    assert torch.equal(got, function(*sides))


def test_without_a_shard_the_ranks_talk_and_the_graph_breaks(ranks):
    ranks(_without_a_shard, 2)
