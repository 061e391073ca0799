"""Every loss at every layout against the dense fp64 reference, many checks a group of ranks."""

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
import vocabtp.kernels as vk
from vocabtp.dist.testing import check_case, check_op, hard_logits, layouts, ops
from vocabtp.kernels.testing import CASES

ROWS, VOCAB = 14, 19


def _upstream(op, rows, ids):
    g = torch.Generator().manual_seed(1)
    shapes = [ids.shape, (rows,)] if op.takes_ids else [(rows,)]
    outputs = 2 if "and_entropy" in op.sharded.__name__ else 1
    out = [torch.rand(shape, generator=g) + 0.5 for shape in shapes[:outputs]]
    out[0][11 % rows] = 0.0
    return out


def _inputs(dtype, op):
    g = torch.Generator().manual_seed(2)
    logits = [x.to(dtype) for x in hard_logits(ROWS, VOCAB)[: op.sides]]
    ids = torch.randint(VOCAB, (ROWS, 3), generator=g)
    ids[10] = -100
    ids[12, 1] = ids[12, 0]  # one id twice
    ids[4:6] = torch.tensor([[VOCAB - 1], [0]])  # the only supported token
    ids[2:4] = VOCAB - 2  # supported
    return logits, ids


def _conformance(rank, world):
    """All ops, layouts and dtypes; returns outputs to compare bitwise between ranks."""
    G = dist.group.WORLD if world > 1 else None
    out = {}
    for cut, all_bounds in layouts(VOCAB, world).items():
        bounds = all_bounds[rank]
        shard = vd.VocabShard(*bounds, VOCAB, G).check()
        for number, (title, op) in enumerate(ops().items()):
            for dtype in (torch.float32, torch.bfloat16):
                logits, ids = _inputs(dtype, op)
                if op.takes_ids and number % 2:
                    ids = ids[:, 0]
                # half of the calls with a shard, half with the group alone or with bounds
                call = {"shard": shard}
                if (number + (dtype is torch.bfloat16)) % 2:
                    call = {"tp_group": G}
                    if op.takes_ids and dtype is torch.bfloat16:
                        call["vocab_start_index"], call["vocab_end_index"] = bounds
                        call["global_vocab_size"] = VOCAB
                upstream = _upstream(op, ROWS, ids)
                index = ids if op.takes_ids else None
                name = f"{cut}: {title} {dtype}"
                try:
                    out[name] = check_op(op, logits, bounds, upstream, index=index, **call)
                except AssertionError as error:
                    error.add_note(name)
                    raise
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
def test_values_and_gradients_at_every_layout(ranks, world):
    results = ranks(_conformance, world, limit=120)
    assert len(results[0]) == len(ops()) * 2 * len(layouts(VOCAB, world))
    for name, values in results[0].items():
        for other in results[1:]:
            for a, b in zip(values, other[name], strict=True):
                assert a.dtype == torch.float32
                assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


def _all_cases(rank, world):
    """The kernels' conformance cases, each at two of the layouts."""
    G = dist.group.WORLD
    for number, case in enumerate(CASES):
        vocab = case.make().student.shape[-1]
        cuts = list(layouts(vocab, world).items())
        for step in (0, 2):
            cut, bounds = cuts[(number + step) % len(cuts)]
            shard = vd.VocabShard(*bounds[rank], vocab, G)
            dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[number % 4]
            try:
                check_case(case, bounds[rank], dtype, shard=shard)
            except AssertionError as error:
                error.add_note(f"{cut} {dtype}")
                raise
    return len(CASES)


def test_conformance_cases_on_three_shards(ranks):
    assert ranks(_all_cases, 3, limit=150) == [len(CASES)] * 3


def _ignored(rank, world):
    """An ignore_index that is a token, and one of another rank's tokens."""
    bounds = layouts(VOCAB, world)["uneven"][rank]
    for op in ops().values():
        if op.takes_ids:
            logits, ids = _inputs(torch.float32, op)
            ids[10] = ids[11, 0] = 3
            op = op._replace(options={**op.options, "ignore_index": 3})
            ids[ids == -100] = 0
            up = _upstream(op, ROWS, ids)
            values = check_op(op, logits, bounds, up, index=ids, tp_group=dist.group.WORLD)
            assert (values[0][ids == 3] == 0).all()
    return True


def test_ignored_ids_may_be_tokens(ranks):
    assert ranks(_ignored, 2) == [True, True]


HOT = {"temperature": 1.7}
CLIP = {"pointwise_clip": 0.02}


@pytest.mark.parametrize(
    ("name", "positional", "options"),
    [
        ("logprobs", {}, {"ignore_index": 5, **HOT}),
        ("entropy", {}, HOT),
        ("logprobs_and_entropy", {}, {"ignore_index": 5, **HOT}),
        ("kl_div", {"reverse": True}, {**CLIP, **HOT}),
        ("kl_div", {"reverse": False}, {**CLIP, **HOT}),
        ("jsd", {"beta": 0.2}, {"rescale": True, **CLIP, **HOT}),
        ("jsd", {"beta": 0.2}, {"rescale": False, **HOT}),
    ],
)
def test_every_option_reaches_the_kernels(name, positional, options):
    """Bitwise the single-device op; each option changes the value, so none can be dropped."""
    logits = [torch.randn(6, 9, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    ids = torch.arange(6)
    ours, plain = getattr(vd, f"vocab_parallel_{name}"), getattr(vk, name)
    args = logits if name in ("kl_div", "jsd") else logits[:1]
    args = [*args, ids] if "logprobs" in name else args
    value = ours(*args, *positional.values(), **options)
    right = plain(*args, **positional, **options)
    both = (value, right) if isinstance(value, tuple) else ((value,), (right,))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    for dropped in options:
        if options[dropped] is not False:
            less = {k: v for k, v in options.items() if k != dropped}
            other = plain(*args, **positional, **less)
            other = other if isinstance(other, tuple) else (other,)
            assert not all(torch.equal(a, b) for a, b in zip(both[0], other, strict=True)), dropped
