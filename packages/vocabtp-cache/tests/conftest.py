"""What several of these tests use."""

from __future__ import annotations

import pytest

from vocabtp.cache import PinnedPool


@pytest.fixture
def poisoned(monkeypatch):
    """Fill what a pool takes back with NaN, behind its copies: a late reader is seen."""
    plain = PinnedPool.take_back

    def take_back(pool, segments):
        segments = list(segments)
        for segment in segments:
            for event in segment.pending:
                event.synchronize()
            pool.view(segment).fill_(255)
        plain(pool, segments)

    monkeypatch.setattr(PinnedPool, "take_back", take_back)
