import pytest
import torch
import torch.distributed as dist

from vocabtp.dist import VocabShard, agree, vocab_parallel_entropy
from vocabtp.dist.shard import bounds_problem, even_bounds
from vocabtp.dist.testing import layouts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, 1, 5, 8, 1031, 1033, 151936])
def test_even_cuts_as_torch_chunk_does(size, world):
    widths = [len(c) for c in torch.arange(size).chunk(world)] if size else []
    widths += [0] * (world - len(widths))
    bounds = even_bounds(size, world)
    assert [end - start for start, end in bounds] == widths
    assert bounds_problem(bounds, size) is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_layouts_tile_the_vocabulary(world):
    for name, bounds in layouts(11, world).items():
        assert bounds_problem(bounds, 11) is None, name
        assert len(bounds) == world


@pytest.mark.parametrize(
    ("bounds", "size", "says"),
    [
        ([(0, 2), (3, 4)], 4, "rank 1 starts at 3, not at 2, where rank 0 ends"),  # gap
        ([(0, 3), (2, 4)], 4, "rank 1 starts at 2, not at 3, where rank 0 ends"),  # overlap
        ([(2, 4), (0, 2)], 4, "rank 0 starts at 2, not at 0"),  # descending
        ([(1, 2), (2, 4)], 4, "rank 0 starts at 1, not at 0"),
        ([(0, 2), (2, 3)], 4, "from 0 to global_vocab_size=4"),  # too short
        ([(0, 2), (2, 2), (2, 4)], 4, None),
        ([(0, 2), (2, 4)], None, None),
    ],
)
def test_bounds_must_tile_in_rank_order(bounds, size, says):
    problem = bounds_problem(bounds, size)
    assert problem is None if says is None else says in problem


def test_shard_is_frozen_and_checks_its_numbers():
    shard = VocabShard(2, 5, 9)
    assert (shard.width, shard.rank, shard.world_size) == (3, 0, 1)
    assert shard == VocabShard(2, 5, 9) != VocabShard(2, 5, 10)
    with pytest.raises(AttributeError):
        shard.start = 1
    for bad in ((3, 2, 9), (-1, 2, 9), (0, 10, 9)):
        with pytest.raises(ValueError, match="0 <= start <= end <= global_size"):
            VocabShard(*bad)
    with pytest.raises(TypeError, match="start must be an int"):
        VocabShard(0.0, 2, 9)
    with pytest.raises(TypeError, match="must be an int"):
        VocabShard(0, True, 9)
    with pytest.raises(TypeError, match=r"tp_group must be a torch\.distributed\.ProcessGroup"):
        VocabShard(0, 2, 9, "tp")


def test_what_is_passed_in_place_of_a_group_is_told_where_to_go():
    x = torch.randn(2, 3)
    with pytest.raises(TypeError, match=r"or None, got VocabShard; pass it as shard="):
        vocab_parallel_entropy(x, VocabShard.even(3))

    class DeviceMesh:
        """Stands for torch's, which wants ranks."""

    with pytest.raises(TypeError, match=r"got DeviceMesh; pass mesh\.get_group\(\)$"):
        vocab_parallel_entropy(x, DeviceMesh())


def test_single_process_shard_is_the_whole_vocabulary():
    assert VocabShard.even(7) == VocabShard.resolve(7) == VocabShard(0, 7, 7).check()


def _messages(rank, world):
    """Each attempt's ValueError text; every rank must end with the same list."""
    g = dist.group.WORLD
    out = []

    def said(call):
        try:
            call()
        except ValueError as error:
            out.append(str(error))
        else:
            out.append("")

    shard = VocabShard.resolve([3, 0, 4][rank], g)
    assert (shard.start, shard.end, shard.global_size) == [(0, 3, 7), (3, 3, 7), (3, 7, 7)][rank]
    assert (shard.rank, shard.world_size) == (rank, 3)
    assert VocabShard.even(4, g) == VocabShard(*[(0, 2), (2, 4), (4, 4)][rank], 4, g).check()
    said(lambda: VocabShard.resolve([3, -1, 4][rank], g))
    said(lambda: VocabShard.resolve([3, "x", None][rank], g))
    said(lambda: VocabShard(*[(0, 2), (3, 4), (4, 6)][rank], 6, g).check())
    said(lambda: VocabShard(*[(4, 6), (2, 4), (0, 2)][rank], 6, g).check())
    said(lambda: VocabShard(*[(0, 2), (2, 4), (4, 6)][rank], [6, 6, 7][rank], g).check())
    said(lambda: VocabShard(*[(0, 2), (2, 4), (4, 6)][rank], 7, g).check())
    said(lambda: agree({"rows": [3, 4, 3][rank], "x": 0.5}, what="f", group=g))
    said(lambda: agree({"rows": 3}, what="f", group=g))
    error = ValueError("no \ud800 \u00e9 luck" * 500) if rank == 1 else None
    said(lambda: agree({"rows": 3}, what="f", group=g, error=error))
    many = {f"fact {i}": "\u6f22" * 300 for i in range(100)}
    said(lambda: agree(many, what="f", group=g))
    said(lambda: agree({**many, "fact 7": rank}, what="f", group=g))
    said(lambda: agree({"x": "a" * 500 + "bcd"[rank]}, what="f", group=g))
    said(lambda: agree({"x": float("nan")}, what="f", group=g))
    said(lambda: agree({"a": 1} if rank else {"b": 1}, what="f", group=g))
    # a group that not everybody is in
    pair = dist.new_group([0, 2])
    if rank == 1:
        said(lambda: VocabShard.even(4, pair))
    else:
        out.append(str(VocabShard.even(4, pair).world_size))
    return out


def test_every_rank_raises_the_same(ranks):
    first, second, third = ranks(_messages, 3)
    assert first == third
    assert first[:-1] == second[:-1]
    assert "not a member of the group" in second[-1]
    assert first[-1] == "2"
    expected = [
        "VocabShard.resolve: rank 1: local_size must be an int >= 0, got -1",
        "rank 1: local_size must be an int >= 0, got 'x'; rank 2: local_size must be an int",
        "rank 1 starts at 3, not at 2, where rank 0 ends; got [0, 2), [3, 4), [4, 6)",
        "bounds must ascend with the group rank",
        "global_vocab_size must be the same on all ranks, got 6 on ranks 0, 1, 7 on rank 2",
        "from 0 to global_vocab_size=7: got [0, 2), [2, 4), [4, 6)",
        "f: rows must be the same on all ranks, got 3 on ranks 0, 2, 4 on rank 1",
        "",
        "f: rank 1: no \ud800 \u00e9 luck",
        "",
        "f: 101 facts must be the same on all ranks, got hash",
        "f: x must be the same on all ranks",
        "",
        "f: b must be the same on all ranks, got 1 on rank 0, nothing on ranks 1, 2; a must be",
    ]
    assert len(expected) == len(first) - 1
    for text, message in zip(expected, first, strict=False):
        assert text in message if text else message == ""


def test_agree_alone_needs_no_group():
    agree({"rows": 3}, what="f", group=None)
    with pytest.raises(ValueError, match=r"^f: bad luck$"):
        agree({}, what="f", group=None, error="bad luck")


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), ("6", TypeError), (True, TypeError)])
def test_even_refuses_what_is_no_size(size, error):
    with pytest.raises(error, match=r"VocabShard\.even: global_size must be an int >= 0, got"):
        VocabShard.even(size)
