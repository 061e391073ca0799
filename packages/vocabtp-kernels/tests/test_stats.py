"""What crosses the wire: the statistics of a shard, and how those of all shards become one."""

from itertools import pairwise

import pytest
import torch

from vocabtp.kernels import LOCAL, _eager, _stats
from vocabtp.kernels._ids import Bounds
from vocabtp.kernels._rows import as_id_rows, as_rows

INF, NAN = float("inf"), float("nan")
F32 = torch.float32


def stats_of(kind, s, t):
    if kind in ("kl", "pair"):
        stats = _eager.kl_stats if kind == "kl" else _eager.pair_stats
        parts = stats(as_rows(s), as_rows(t), F32, 1.3, merged=True)
        return _stats.ShardStats(*(part[0] for part in parts))
    none = torch.empty(s.shape[0], 0, dtype=torch.int64)
    bounds = Bounds(-100, 0, s.shape[1])
    shard = _eager.token_stats(
        as_rows(s),
        as_id_rows(none),
        bounds,
        F32,
        1.3,
        entropy=kind == "entropy",
        merged=True,
        watch=None,
    )
    return _stats.ShardStats(*(part[0] for part in shard.stats))


def merge(kind, parts):
    stacked = _stats.ShardStats(*(torch.stack(each) for each in zip(*parts, strict=True)))
    return (_stats.merge_kl if kind == "kl" else _stats.merge_softmax)(stacked, 1.3)


KINDS = ["logprobs", "entropy", "pair", "kl"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [0, 1, 70])
def test_a_shard_without_support_has_the_identity(kind, width):
    x = torch.full((3, width), -INF)
    stats = stats_of(kind, x, x)
    assert (stats.maxes == -INF).all()
    assert (stats.sums == 0).all()
    assert (stats.flags == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_adds_nothing_wherever_it_stands(kind):
    g = torch.Generator().manual_seed(0)
    s, t = torch.randn(4, 50, generator=g) * 5, torch.randn(4, 50, generator=g) * 5
    s[1, 3], t[1, 3] = -INF, -INF
    t[2, 4] = -INF
    s[3], t[3] = -INF, -INF
    mine, empty = stats_of(kind, s, t), stats_of(kind, s[:, :0], t[:, :0])
    for parts in ([mine], [mine, empty], [empty, mine], [empty, empty, mine, empty]):
        merged = merge(kind, parts)
        for one, other in zip(merged, mine, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_statistics_are_those_of_the_whole(kind):
    g = torch.Generator().manual_seed(1)
    s, t = torch.randn(4, 90, generator=g) * 9, torch.randn(4, 90, generator=g) * 9
    s[1, :40], t[1, :40] = -INF, -INF
    t[2, 80:] = -INF
    edges = [0, 0, 17, 40, 40, 85, 90]
    parts = [stats_of(kind, s[:, a:b], t[:, a:b]) for a, b in pairwise(edges)]
    merged, whole = merge(kind, parts), stats_of(kind, s, t)
    assert torch.equal(merged.maxes, whole.maxes)
    assert torch.equal(merged.flags, whole.flags)
    # W of a row with an infinite KL means nothing
    sane = (whole.flags == 0).all(0)
    torch.testing.assert_close(merged.sums[:, sane], whole.sums[:, sane], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("at", [0, 30, 69])
def test_a_poisoned_shard_poisons_the_row(kind, poison, at):
    x = torch.zeros(2, 70)
    x[0, at] = poison
    parts = [
        stats_of(kind, x[:, a:b], x[:, a:b]) for a, b in ((0, 20), (20, 20), (20, 60), (60, 70))
    ]
    merged = merge(kind, parts)
    assert merged.sums[:, 0].isnan().all()
    assert merged.sums[:, 1].isfinite().all()


def test_a_rank_far_below_the_maximum_weighs_nothing():
    # the shift overflows to -inf for logits at both ends of fp32
    low, high = torch.full((1, 3), -3e38), torch.full((1, 2), 3e38)
    for kind in KINDS:
        merged = merge(kind, [stats_of(kind, x, x) for x in (low, high, low)])
        alone = stats_of(kind, high, high)
        assert torch.equal(merged.sums, alone.sums)


def test_sums_are_added_in_rank_order():
    # 1 is lost next to 2^24, so that only one order gives this sum
    parts = torch.tensor([2.0**24, 1.0, 1.0])
    assert _stats.in_rank_order(parts).item() == 2.0**24
    assert _stats.in_rank_order(parts.flip(0)).item() == 2.0**24 + 2


class Twice:
    """Two ranks that hold the same."""

    def gather(self, x):
        return torch.stack([x, x])

    def sum(self, x):
        return x


def test_gather_keeps_the_parts_apart():
    stats = _stats.ShardStats(
        torch.full((1, 2, 3), 1.0), torch.full((1, 3, 3), 2.0), torch.full((1, 1, 3), 3.0)
    )
    gathered = _stats.gather(stats, Twice())
    assert [tuple(part.shape) for part in gathered] == [(2, 2, 3), (2, 3, 3), (2, 1, 3)]
    for one, other in zip(gathered, stats, strict=True):
        assert all(torch.equal(part, other[0]) for part in one)
    # a single rank may have several parts of its own
    parts = _stats.ShardStats(*(torch.cat([part, part]) for part in stats))
    assert _stats.gather(parts, LOCAL) is parts
    assert repr(LOCAL) == "LOCAL"
