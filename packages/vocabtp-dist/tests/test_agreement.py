"""What one rank alone could see is the same ValueError on all of them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
from counted_collectives import counted
from vocabtp.dist.testing import ops


def _said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _pair_attempts(rank, world, G):
    """Attempts on every op, by what is wrong: name -> (call, expected text)."""
    one = rank == 1
    good = torch.zeros(4, 3)
    ids = torch.zeros(4, dtype=torch.int64)
    shapes = {
        "rows": (torch.zeros(5 if one else 4, 3), "leading shape must be the same on all ranks"),
        "dims": (torch.zeros((2, 2, 3) if one else (4, 3)), "got [4, 3] on ranks 0, 2, [2, 2, 3]"),
        "dtype": (good.bfloat16() if one else good, "dtype must be the same on all ranks, got"),
        "not floating": (good.int() if one else good, "rank 1: "),
        "no dimension": (torch.tensor(1.0) if one else good, "rank 1: "),
        "not a tensor": ([1.0] if one else good, "rank 1: "),
    }
    out = {}
    for name, (x, text) in shapes.items():
        lead = x.shape[:-1] if isinstance(x, torch.Tensor) and x.ndim else (4,)
        index = ids.new_zeros(lead)
        if name == "dims":
            text = "leading shape must be the same on all ranks, got [4] on ranks 0, 2, [2, 2]"
        for title, op in ops().items():
            args = [x] * op.sides + ([index] if op.takes_ids else [])
            out[f"{name}: {title}"] = (
                lambda op=op, args=args: op.sharded(*args, **op.options, tp_group=G),
                text,
            )
    for title, op in ops().items():
        args = [good] * op.sides + ([ids] if op.takes_ids else [])
        for bad in (0.0, -1.0, float("nan"), float("inf"), "hot"):
            options = {**op.options, "temperature": bad if one else 1.0}
            out[f"temperature {bad}: {title}"] = (
                lambda op=op, args=args, o=options: op.sharded(*args, **o, tp_group=G),
                "rank 1: temperature must be",
            )
        options = {**op.options, "temperature": 2.0 if one else 1.5}
        out[f"temperatures: {title}"] = (
            lambda op=op, args=args, o=options: op.sharded(*args, **o, tp_group=G),
            "temperature must be the same on all ranks, got 1.5 on ranks 0, 2, 2.0 on rank 1",
        )
        if op.sides == 2:
            for name, other, text in (
                ("teacher rows", torch.zeros(5, 3), "rank 1: student and teacher must share a"),
                ("teacher gathered", torch.zeros(4, 9), "rank 1: student and teacher must share"),
                ("teacher dtype", good.half(), "float32, float16 on rank 1"),
                ("teacher type", None, "rank 1: teacher_logits must be a tensor, got NoneType"),
            ):
                args = [good, other if one else good]
                out[f"{name}: {title}"] = (
                    lambda op=op, args=args: op.sharded(*args, **op.options, tp_group=G),
                    text,
                )
    return out


def _token_attempts(rank, world, G):
    """The two ops with ids: index shapes, types and values; bounds."""
    one = rank == 1
    x = torch.zeros(4, 3)
    ids = torch.tensor([0, 3, 8, 5])
    out = {}
    for op in (vd.vocab_parallel_logprobs, vd.vocab_parallel_logprobs_and_entropy):

        def add(name, text, *args, op=op, **kwargs):
            call = (lambda: op(*args, **kwargs), text)
            out[f"{name}: {op.__name__}"] = call

        add("index rows", "rank 1: index must be [4]", x, ids[:3] if one else ids, G)
        add("index K", "index shape must be", x, ids[:, None] if one else ids, G)
        add("index type", "rank 1: index must hold integers", x, ids.float() if one else ids, G)
        add("index none", "rank 1: index must be a tensor", x, None if one else ids, G)
        for bad in (9, -1, -101, 2**40):
            wrong = ids.clone()
            wrong[2] = bad
            add(f"id {bad}", "an id must be in [0, 9)", x, wrong if one else ids, G)
            shard = vd.VocabShard(3 * rank, 3 * rank + 3, 9, G)
            add(
                f"id {bad}, shard", "an id must be in [0, 9)", x, wrong if one else ids, shard=shard
            )
            add(f"id {bad} everywhere", "an id must be in [0, 9)", x, wrong, G)
        add("ignore_index", "ignore_index must be the same", x, ids, G, ignore_index=rank)
        add(
            "ignore type", "rank 1: ignore_index must be", x, ids, G, ignore_index="x" if one else 1
        )
        add("validate_ids", "validate_ids must be", x, ids, G, validate_ids=True if one else None)

        def bounded(name, text, start, end, size, x=x, op=op):
            add(f"bounds {name}", text, x, ids, G, start, end, size, op=op)

        rule = "bounds must ascend with the group rank, without gap or overlap"
        down = 3 * (2 - rank)
        bounded("descending", f"{rule}: rank 0 starts at 6, not at 0", down, down + 3, 9)
        bounded("overlap", "rank 1 starts at 2, not at 3", 3 * rank - one, 3 * rank + 3 - one, 9)
        bounded("gap", "rank 1 starts at 4, not at 3", 3 * rank + one, 3 * rank + 3 + one, 9)
        bounded("not from 0", "rank 0 starts at 1, not at 0", 3 * rank + 1, 3 * rank + 4, 10)
        bounded("too short", "from 0 to global_vocab_size=10", 3 * rank, 3 * rank + 3, 10)
        bounded("sizes", "global_vocab_size must be the same", 3 * rank, 3 * rank + 3, 9 + rank)
        bounded("width", "rank 1: vocab_parallel_logits has 3", 3 * rank, 3 * rank + 3 - one, 9)
        bounded("missing", "on all ranks or on none", *(None, None) if one else (0, 3), 9)
        bounded("half", "rank 1: vocab_start_index and vocab_end", 3 * rank, None if one else 3, 9)
        bounded("type", "rank 1: vocab_start_index must be an int", 0.5 if one else 0, 3, 9)
        bounded(
            "beyond", "rank 1: not a range of the vocabulary", 3 * rank, 3 * rank + 3, 9 - 4 * one
        )
        bounded("size alone", "add up to 9, not to 10", None, None, 10)
        bounded("size is negative", "global_vocab_size must be >= 0", None, None, -1)
        # D8: gathered logits passed as a shard
        whole = torch.zeros(4, 9)
        g = "these look like gathered logits"
        bounded("gathered, bounds", g, 3 * rank, 3 * rank + 3, 9, whole)
        bounded("gathered, size", g, None, None, 9, whole)
        bounded("gathered on one", "rank 1: ", 3 * rank, 3 * rank + 3, 9, whole if one else x)
        bounded(
            "gathered on one, size", "add up to 15, not to 9", None, None, 9, whole if one else x
        )
    return out


def _other_attempts(rank, world, G):
    """Options of KL and JSD; ranks that call different things."""
    one = rank == 1
    x = torch.zeros(4, 3)
    kl, jsd, entropy = vd.vocab_parallel_kl_div, vd.vocab_parallel_jsd, vd.vocab_parallel_entropy
    shard = vd.VocabShard(3 * rank, 3 * rank + 3, 9, G)
    whole = torch.zeros(4, 9)
    return {
        "reverse": (lambda: kl(x, x, one, G), "reverse must be the same on all ranks, got false"),
        "reverse type": (lambda: kl(x, x, "yes" if one else True, G), "rank 1: reverse must be"),
        "clip": (lambda: kl(x, x, True, G, pointwise_clip=1.0 + one), "pointwise_clip must be the"),
        "clip 0": (lambda: jsd(x, x, 0.5, G, pointwise_clip=0.0 if one else None), "rank 1: point"),
        "beta": (lambda: jsd(x, x, 0.5 + 0.1 * one, G), "beta must be the same on all ranks"),
        "beta 2": (lambda: jsd(x, x, 2.0 if one else 0.5, G), "rank 1: beta must be in [0, 1]"),
        "beta nan": (lambda: jsd(x, x, float("nan"), G), "ranks 0, 1, 2: beta must be in [0, 1]"),
        "rescale": (lambda: jsd(x, x, 0.5, G, rescale=one), "rescale must be the same"),
        "other op": (
            lambda: entropy(x, G) if one else kl(x, x, False, G),
            "op must be the same on all ranks, got vocab_parallel_kl_div on ranks 0, 2",
        ),
        # one gathered tensor among shards of another width
        "gather rows": (
            lambda: vd.gather_vocab(torch.zeros(4 + one, 3), shard),
            "gather_vocab: leading shape must be the same",
        ),
        "gather dtype": (
            lambda: vd.gather_vocab(x.half() if one else x, shard),
            "gather_vocab: dtype must be the same",
        ),
        "gather gathered": (
            lambda: vd.gather_vocab(whole if one else x, shard),
            "rank 1: vocab_parallel_logits has 9 columns, but the shard is columns [3, 6) of 9",
        ),
        "gather bounds": (
            lambda: vd.gather_vocab(x, vd.VocabShard(3 * (2 - rank), 9 - 3 * rank, 9, G)),
            "bounds must ascend with the group rank",
        ),
    }


def _strange_attempts(rank, world, G):
    """What fails on one rank alone, and not by a check of ours."""
    one = rank == 1
    x, ids = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    nested = torch.nested.nested_tensor([[1.0], [1.0, 2.0]], layout=torch.jagged)
    shard = vd.VocabShard(3 * rank, 3 * rank + 3, 9, G)

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("an odd tensor")

    odd = torch.zeros(4, 3).as_subclass(Odd)
    entropy, logprobs = vd.vocab_parallel_entropy, vd.vocab_parallel_logprobs
    return {
        "huge": (lambda: entropy(x, G, temperature=10**400 if one else 1.0), "rank 1: temperature"),
        "huge id": (
            lambda: logprobs(x, ids, G, ignore_index=2**63 if one else -1),
            "rank 1: ignore_index must be an integer of 64 bits",
        ),
        "nested": (lambda: entropy(nested if one else x, G), "rank 1: vocab_parallel_logits must"),
        "odd": (lambda: entropy(odd if one else x, G), "rank 1: an odd tensor"),
        "odd gather": (lambda: vd.gather_vocab(odd if one else x, shard), "rank 1: an odd tensor"),
        "text": (
            lambda: vd.agree({"a": "\ud800" * 500 if one else ""}, what="text", group=G),
            "text: a must be the same on all ranks",
        ),
    }


def _all_attempts(rank, world):
    G = dist.group.WORLD
    out = []
    attempts = _pair_attempts(rank, world, G)
    attempts |= _token_attempts(rank, world, G)
    attempts |= _other_attempts(rank, world, G)
    attempts |= _strange_attempts(rank, world, G)
    for name, (call, text) in attempts.items():
        out.append((name, text, _said(call)))
    # nothing is left over that a later call would trip on
    assert _said(lambda: vd.vocab_parallel_entropy(torch.zeros(4, 3), G)) == ""
    return out


def test_every_rank_raises_the_same_error(ranks):
    first, *others = ranks(_all_attempts, 3, limit=150)
    assert len(first) > 250
    for i, (name, text, message) in enumerate(first):
        for other in others:
            assert other[i][2] == message, name
        assert text in message, (name, message)
        function = name.split(": ")[-1]
        if function.startswith("vocab_parallel_") and "id " not in name:
            assert message.startswith(function), (name, message)
        assert len(message) < 700


def _with_shard(rank, world):
    """`shard=` contradicting the other arguments, the same way on all ranks."""
    G = dist.group.WORLD
    twin = dist.new_group(list(range(world)))
    shard = vd.VocabShard(3 * rank, 3 * rank + 3, 6, G)
    x, whole, ids = torch.zeros(4, 3), torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
    out = []
    with counted() as calls:
        for title, op in ops().items():
            args = [x] * op.sides + ([ids] if op.takes_ids else [])
            gathered = [whole] * op.sides + ([ids] if op.takes_ids else [])
            out.append(_said(lambda o=op, a=args: o.sharded(*a, shard=shard, tp_group=twin)))
            assert "tp_group and shard.tp_group must be the same group" in out[-1], title
            out.append(_said(lambda o=op, a=gathered: o.sharded(*a, shard=shard)))
            assert "these look like gathered logits" in out[-1], title
            with pytest.raises(TypeError, match="shard must be a VocabShard"):
                op.sharded(*args, shard=(0, 3))
            with pytest.raises(TypeError, match="tp_group must be a torch"):
                op.sharded(*args, tp_group=3)
        for start, size in ((3 * rank, 7), (3 - 3 * rank, 6)):
            call = partial(vd.vocab_parallel_logprobs, x, ids, None, start, start + 3, size)
            out.append(_said(partial(call, shard=shard)))
            assert "the vocabulary bounds says columns" in out[-1]
    assert calls == []
    # the same group and the same bounds are fine
    vd.vocab_parallel_logprobs(x, ids, G, 3 * rank, 3 * rank + 3, 6, shard=shard)
    return True


def test_a_shard_that_contradicts_the_call_is_refused(ranks):
    assert ranks(_with_shard, 2) == [True, True]


def test_a_part_of_the_vocabulary_needs_a_group():
    """DeepSpeed computes on the local shard alone here, silently."""
    part = vd.VocabShard(0, 4, 8)
    for op in ops().values():
        args = [torch.zeros(2, 4)] * op.sides + ([torch.zeros(2).long()] if op.takes_ids else [])
        with pytest.raises(ValueError, match="pass the tp_group that shares the vocabulary"):
            op.sharded(*args, **op.options, shard=part)
