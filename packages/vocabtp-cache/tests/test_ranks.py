"""Every rank caches its own columns."""

import pytest
import torch

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard

LOGITS = torch.arange(30.0).view(6, 5)


def cached_columns(rank, world):
    """Columns 0-2 or 3-4, fetched in chunks; the peer's shard is refused."""
    group = torch.distributed.group.WORLD
    shard = VocabShard.even(5, group)
    peer = VocabShard(*((3, 5), (0, 3))[rank], 5, group)
    with TeacherLogitCache.store(LOGITS[:, shard.start : shard.end], shard) as cache:
        with pytest.raises(ValueError, match="the shard must be the one"):
            cache.fetch(0, 1, shard=peer)
        equal = VocabShard(shard.start, shard.end, 5, group)
        return torch.cat([cache.fetch(at, at + 2, shard=equal) for at in (0, 2, 4)])


def test_each_rank_caches_its_own_columns(ranks):
    assert torch.equal(torch.cat(ranks(cached_columns, 2), dim=1).float(), LOGITS)
