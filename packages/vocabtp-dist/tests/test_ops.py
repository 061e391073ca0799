"""Every loss at every layout against the dense fp64 reference, many checks a group of ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
import vocabtp.kernels as vk
from tp_places import at
from vocabtp.dist.testing import check_case, check_op, hard_logits, layouts, ops, piece
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


def _layouts(world, place):
    """All of them; interpreted, three of the six on three ranks."""
    every = list(layouts(VOCAB, world).items())
    return dict(every[1::2] if place.interpreted and world > 2 else every)


def _conformance(rank, world, place):
    """All ops, layouts and dtypes; returns outputs to compare bitwise between ranks."""
    G = dist.group.WORLD if world > 1 else None
    out = {}
    for turn, (cut, all_bounds) in enumerate(_layouts(world, place).items()):
        bounds = all_bounds[rank]
        shard = vd.VocabShard(*bounds, VOCAB, G).check()
        for number, (title, op) in enumerate(ops().items()):
            for dtype in (torch.float32, torch.bfloat16):
                rows = torch.arange(ROWS)
                if place.interpreted:
                    # on two ranks every row of every op in some layout
                    if (turn + number + world) % 2 != (dtype is torch.bfloat16):
                        continue
                    rows = rows[(turn + number) % 4 :: 4]
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
                upstream = [g[rows].to(place.device) for g in _upstream(op, ROWS, ids)]
                logits = [x[rows].to(place.device) for x in logits]
                index = ids[rows].to(place.device) if op.takes_ids else None
                name = f"{cut}: {title} {dtype}"
                try:
                    values = check_op(op, logits, bounds, upstream, index=index, **call)
                except AssertionError as error:
                    error.add_note(name)
                    raise
                out[name] = [x.cpu() for x in values]
    return out


@at(eager=[1, 2, 4])
def test_values_and_gradients_at_every_layout(tp):
    results = tp(_conformance, limit=120)
    each = 1 if tp.place.interpreted else 2
    assert len(results[0]) == len(ops()) * each * len(_layouts(tp.world, tp.place))
    for name, values in results[0].items():
        for other in results[1:]:
            for a, b in zip(values, other[name], strict=True):
                assert a.dtype == torch.float32
                assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


def _all_cases(rank, world, place):
    """The kernels' conformance cases, each at two of the layouts."""
    G = dist.group.WORLD
    # the dtypes that Triton takes; interpreted: each input, and each op once
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    dtypes += [torch.float64] if place.backend == "eager" else []
    for number, case in enumerate(CASES):
        if place.interpreted and number % 10:
            continue
        vocab = case.make().student.shape[-1]
        cuts = list(layouts(vocab, world).items())
        for step in (0,) if place.interpreted else (0, 2):
            cut, bounds = cuts[(number + step) % len(cuts)]
            shard = vd.VocabShard(*bounds[rank], vocab, G)
            dtype = dtypes[number % len(dtypes)]
            try:
                check_case(case, bounds[rank], dtype, device=place.device, shard=shard)
            except AssertionError as error:
                error.add_note(f"{cut} {dtype}")
                raise
    return len(CASES)


@at(eager=[3], interpreted=[3])
def test_conformance_cases_on_shards(tp):
    assert tp(_all_cases, limit=150) == [len(CASES)] * tp.world


def _ignored(rank, world, place):
    """An ignore_index that is a token, and one of another rank's tokens."""
    bounds = layouts(VOCAB, world)["uneven"][rank]
    for op in ops().values():
        if op.takes_ids:
            logits, ids = _inputs(torch.float32, op)
            ids[10] = ids[11, 0] = 3
            op = op._replace(options={**op.options, "ignore_index": 3})
            ids[ids == -100] = 0
            up = [g.to(place.device) for g in _upstream(op, ROWS, ids)]
            logits, ids = [x.to(place.device) for x in logits], ids.to(place.device)
            values = check_op(op, logits, bounds, up, index=ids, tp_group=dist.group.WORLD)
            assert (values[0][ids == 3] == 0).all()
    return True


@at(eager=[2], interpreted=[2])
def test_ignored_ids_may_be_tokens(tp):
    assert tp(_ignored) == [True, True]


def test_a_bad_id_in_a_single_process_names_the_op_that_was_called():
    x, bad = torch.zeros(2, 3), torch.tensor([0, 3])
    for op in (vd.vocab_parallel_logprobs, vd.vocab_parallel_logprobs_and_entropy):
        with pytest.raises(ValueError, match=rf"^{op.__name__}: an id must be in \[0, 3\)"):
            op(x, bad)


def _bad_id(rank, world, place):
    """One rank has an id that is no token: all raise the same; or NaN there, the rest as it was."""
    vocab = 5 * world
    bounds = layouts(vocab, world)["uneven"]
    x = torch.randn(4, vocab, generator=torch.Generator().manual_seed(6)).to(place.device)
    good = torch.tensor([[0, 1], [vocab - 1, 3], [2, 2], [-100, 4]], device=place.device)
    bad = good.clone()
    if rank == 1:
        bad[1, 0] = vocab
    said = []
    for op in (vd.vocab_parallel_logprobs, vd.vocab_parallel_logprobs_and_entropy):
        call = {"tp_group": dist.group.WORLD, "temperature": 0.5}
        local = piece(x, bounds[rank], requires_grad=True)
        with pytest.raises(ValueError, match=rf"^{op.__name__}: an id must be in") as info:
            op(local, bad, validate_ids=True, **call)
        said.append(str(info.value))
        found, right = [], []
        for ids, out in ((bad, found), (good, right)):
            values = op(local, ids, validate_ids=False, **call)
            values = values if isinstance(values, tuple) else (values,)
            out += [*values, torch.autograd.grad(sum(v.sum() for v in values), local)[0]]
            with contextlib.suppress(ValueError):
                vk.check_ids()
        # log-probabilities and gradient; the entropy asks for no id
        for number, (a, b) in enumerate(zip(found, right, strict=True)):
            if number == 1 and len(found) == 3:
                assert torch.equal(a, b)
                continue
            assert a[1].isnan().all()
            assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])
    return said


@at(eager=[2], interpreted=[2])
def test_a_bad_id_on_one_rank_is_everybodys(tp):
    first, *others = tp(_bad_id)
    assert "got 10 at position [1] on rank 1" in first[0]
    assert all(other == first for other in others)


def _real_shapes(rank, world, place):
    """A real vocabulary: unaligned, and with one rank's columns all masked."""
    vocab = 151_936
    bounds = [(0, 75_967), (75_967, vocab)]
    g = torch.Generator().manual_seed(7)
    sides = [torch.randn(9, vocab, generator=g) * 3 for _ in range(2)]
    sides[1][5] = sides[0][5] + 1e-3 * sides[1][5]
    for side in sides:
        side[6, : bounds[0][1]] = side[7, bounds[1][0] :] = -float("inf")
        side[8, ::2] = -float("inf")
    ids = torch.randint(vocab, (9, 4), generator=g)
    ids[6:8], ids[8] = torch.tensor([[vocab - 1], [0]]), 1
    out = {}
    for title, op in ops().items():
        for dtype in (torch.float32, torch.bfloat16):
            logits = [x.to(place.device, dtype) for x in sides[: op.sides]]
            up = [g.to(place.device) for g in _upstream(op, 9, ids)]
            index = ids.to(place.device) if op.takes_ids else None
            call = {"index": index, "tp_group": dist.group.WORLD}
            try:
                values = check_op(op, logits, bounds[rank], up, **call)
            except AssertionError as error:
                error.add_note(f"{title} {dtype}")
                raise
            out[title, dtype] = [x.cpu() for x in values]
    return out


@at(interpreted=[])
def test_real_shapes(tp):
    first, second = tp(_real_shapes, limit=240)
    for name, values in first.items():
        assert all(torch.equal(a, b) for a, b in zip(values, second[name], strict=True)), name


def _where(rank, world, place):
    x = torch.zeros(1, 2, device=place.device)
    group = dist.get_backend()
    return x.device.type, vk.which_backend(x)[0], group == "gloo"


@at(eager=[1], interpreted=[2])
def test_the_places_are_what_they_say(tp):
    place = tp.place
    assert tp(_where) == [(place.device, place.backend, place.device == "cpu")] * tp.world


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
