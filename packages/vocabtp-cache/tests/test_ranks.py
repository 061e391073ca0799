"""Every rank caches its own columns."""

import pytest
import torch

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard

LOGITS = torch.arange(30.0).view(6, 5)


def cached_columns(rank, world, directory):
    """Columns 0-2 or 3-4, fetched in chunks and saved; the peer's shard is refused."""
    group = torch.distributed.group.WORLD
    shard = VocabShard.even(5, group)
    peer = VocabShard(*((3, 5), (0, 3))[rank], 5, group)
    with TeacherLogitCache.store(LOGITS[:, shard.start : shard.end], shard) as cache:
        with pytest.raises(ValueError, match="the shard must be the one"):
            cache.fetch(0, 1, shard=peer)
        cache.save(directory)
        equal = VocabShard(shard.start, shard.end, 5, group)
        return torch.cat([cache.fetch(at, at + 2, shard=equal) for at in (0, 2, 4)])


def test_each_rank_caches_and_saves_its_own_columns(ranks, tmp_path):
    saved = tmp_path / "saved"
    parts = ranks(cached_columns, 2, str(saved))
    assert torch.equal(torch.cat(parts, dim=1).float(), LOGITS)
    # what two ranks saved at the same time, opened by one, and by the middle one of three
    for shard in (VocabShard(0, 5, 5), VocabShard(2, 4, 5)):
        with TeacherLogitCache.open(saved, shard) as cache:
            columns = LOGITS[:, shard.start : shard.end]
            assert torch.equal(cache.fetch(0, 6, shard=shard).float(), columns)
