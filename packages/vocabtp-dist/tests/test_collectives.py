"""How many collectives each op makes, and that one process makes none."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
from counted_collectives import COLLECTIVES, counted
from tp_places import at
from vocabtp.dist.testing import ops, piece

BOUNDS = [(0, 3), (3, 3), (3, 8)]
V = 8


def kind(names):
    """`g` for an all_gather, `r` for an all_reduce."""
    return "".join("g" if "gather" in n else "r" if n == "all_reduce" else "?" for n in names)


def _count(rank, world, place):
    """Collectives of every op without and with a shard, and of the backward."""
    G = dist.group.WORLD
    shard = vd.VocabShard(*BOUNDS[rank], V, G)
    x = torch.randn(1 if place.interpreted else 4, V, generator=torch.Generator().manual_seed(0))
    out = {}
    for title, op in ops().items():
        local = [piece(x * (i + 1), BOUNDS[rank], requires_grad=True) for i in range(op.sides)]
        args = [*local, torch.arange(len(x))] if op.takes_ids else local
        for how, call in (("group", {"tp_group": G}), ("shard", {"shard": shard})):
            with counted() as forward:
                value = op.sharded(*args, **op.options, **call)
            value = value if isinstance(value, tuple) else (value,)
            with counted() as backward:
                sum(v.sum() for v in value).backward()
            out[title, how] = kind(forward), kind(backward)
    keys = torch.arange(len(x))
    for name, options in {
        "sample": {},
        "top_k": {"top_k": 2, "top_p": 0.5, "min_p": 0.1},
        "min_p": {"min_p": 0.1},
        "top_p": {"top_p": 0.5, "min_p": 0.1},
    }.items():
        with counted() as calls:
            vd.vocab_parallel_sample(local[0], shard, keys=keys, **options)
        out[name] = kind(calls)
    for name, call in {
        "argmax": lambda: vd.vocab_parallel_argmax(local[0], shard),
        "gather": lambda: vd.gather_vocab(local[0], shard).sum().backward(),
        "resolve": lambda: vd.VocabShard.resolve(shard.width, G),
        "even": lambda: vd.VocabShard.even(V, G),
        "agree": lambda: vd.agree({"x": 1}, what="test", group=G),
    }.items():
        with counted() as calls:
            call()
        out[name] = kind(calls)
    return out


@at(eager=[3], interpreted=[3], gpus=[])
def test_number_of_collectives(tp):
    first, *others = tp(_count)
    assert all(other == first for other in others)
    for title, op in ops().items():
        forward = "gr" if op.takes_ids else "g"
        # pairs that read twice: a clip, and JSD between its ends
        interior = "jsd" in title and 0 < op.options.get("beta", 0.5) < 1
        if "pointwise_clip" in op.options or interior:
            forward = "gg"
        assert first[title, "shard"] == (forward, ""), title
        assert first[title, "group"] == ("g" + forward, ""), title
    assert first["sample"] == "g"
    assert first["top_k"] == "g"
    assert first["min_p"] == "rg"
    assert first["top_p"] == "r" + 9 * "r" + "g"
    assert first["argmax"] == "r"
    assert first["gather"] == "gg"
    assert first["resolve"] == first["agree"] == "g"
    assert first["even"] == ""


def _no_calls(*args, **kwargs):
    raise AssertionError("torch.distributed was called")


def test_one_process_never_touches_torch_distributed():
    x = torch.randn(4, V, requires_grad=True)
    ids = torch.arange(4)
    with contextlib.ExitStack() as stack:
        for name in [*COLLECTIVES, "get_rank", "get_world_size", "get_backend_config"]:
            stack.enter_context(mock.patch.object(dist, name, _no_calls))
        for shard in (None, vd.VocabShard.even(V), vd.VocabShard.resolve(V).check()):
            for op in ops().values():
                args = [x] * op.sides + ([ids] if op.takes_ids else [])
                value = op.sharded(*args, **op.options, shard=shard)
                (sum(value) if isinstance(value, tuple) else value).sum().backward()
            vd.vocab_parallel_argmax(x, shard)
            vd.vocab_parallel_sample(x, shard, keys=ids, top_p=0.5, min_p=0.1)
            vd.vocab_parallel_sample(x, shard, keys=ids, top_k=2)
            assert vd.gather_vocab(x, shard) is x
        vd.vocab_parallel_logprobs(x, ids, None, 0, V, V)
        for bounds in ((0, 4, 8), (2, 10, 12), (None, None, 9), (0, 8, 9)):
            with pytest.raises(ValueError, match=r"not the whole vocabulary|but the shard is"):
                vd.vocab_parallel_logprobs(x, ids, None, *bounds)
    assert not dist.is_initialized()
