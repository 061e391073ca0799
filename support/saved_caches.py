"""Caches of known logits, saved at any cut of the vocabulary."""

from __future__ import annotations

from itertools import pairwise

import torch

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard

V = 11
LOGITS = torch.randn(6, V, generator=torch.Generator().manual_seed(0))


def same_bits(a, b):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def cut(bounds):
    """Shards between these columns."""
    return [VocabShard(a, b, V) for a, b in pairwise(bounds)]


def save(directory, bounds=(0, 4, V), logits=LOGITS, entry=0, **identity):
    for shard in cut(bounds):
        columns = logits[..., shard.start : shard.end]
        with TeacherLogitCache.store(columns, shard, torch.float32, **identity) as cache:
            cache.save(directory, entry=entry)
