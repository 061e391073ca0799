"""A cache serves those whom it was filled for, and nobody else."""

from __future__ import annotations

import pytest
import torch

from vocabtp.cache import Identity, TeacherLogitCache
from vocabtp.dist import VocabShard

SHARD = VocabShard(0, 3, 7)
TOKENS = torch.tensor([[5, 6, 7], [8, 9, 10]])
MASK = torch.tensor([[False, True, True], [False, False, True]])


def filled() -> TeacherLogitCache:
    return TeacherLogitCache.store(
        torch.randn(3, 3), SHARD, teacher="big/v1", tokens=TOKENS, positions=MASK
    )


def test_a_cache_serves_its_own():
    cache = filled()
    cache.check(SHARD, teacher="big/v1", tokens=TOKENS.int(), positions=MASK.long())
    cache.check()
    assert cache.identity.teacher == "big/v1"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"shard": VocabShard(3, 6, 7)}, r"the shard must be .* \[0, 3\) of 7, got columns"),
        ({"teacher": "big/v2"}, "teacher must be the cache's own, big/v1, got big/v2"),
        ({"tokens": TOKENS + 1}, "tokens must be"),
        ({"tokens": TOKENS.view(3, 2)}, "tokens must be"),
        ({"tokens": TOKENS.flip(0)}, "tokens must be"),
        ({"positions": ~MASK}, "positions must be"),
    ],
)
def test_a_cache_refuses_others(other, message):
    with pytest.raises(ValueError, match=message):
        filled().check(**other)


@pytest.mark.parametrize(
    "asked", [{"teacher": "a"}, {"tokens": TOKENS}, {"positions": MASK}, {"shard": SHARD}]
)
def test_what_a_cache_was_not_told_matches_nothing(asked):
    cache = TeacherLogitCache.store(torch.randn(2, 3))
    assert cache.identity == Identity()
    with pytest.raises(ValueError, match=r"check: .*(was not told|no shard)"):
        cache.check(**asked)


def test_what_is_no_identity_is_refused():
    for wrong, message in (
        ({"teacher": 3}, "teacher must be a string, got int"),
        ({"tokens": [1, 2]}, "tokens must be a tensor, got list"),
        ({"positions": torch.ones(2)}, "positions must be integers or bools, got torch.float32"),
    ):
        with pytest.raises(TypeError, match=message):
            TeacherLogitCache.store(torch.randn(2, 3), **wrong)
        with pytest.raises(TypeError, match=message):
            filled().check(**wrong)


def test_strides_and_empty_ids_have_a_digest():
    empty = torch.empty(0, 4, dtype=torch.int64)
    cache = TeacherLogitCache.store(torch.randn(2, 3), tokens=TOKENS.t(), positions=empty)
    cache.check(tokens=TOKENS.t().contiguous(), positions=empty.int())
    with pytest.raises(ValueError, match="positions"):
        cache.check(positions=empty.t())
