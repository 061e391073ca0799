"""Part hidden of cache.py: hidden states against logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from cache_parts import Call, Row, Sizes, in_turns
from vocabtp.cache import (
    PinnedPool,
    TeacherCache,
    TeacherHead,
    TeacherHiddenCache,
    TeacherLogitCache,
)
from vocabtp.dist import vocab_parallel_kl_div


def hidden(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """The same rows kept as hidden states and as logits, for teachers of several widths."""
    for width in sizes.hidden:
        yield from _hidden(sizes, device, width)


def _hidden(sizes: Sizes, device: torch.device, width: int) -> Iterator[Row]:
    rows, columns, chunk = sizes.hidden_rows, sizes.widths[0], sizes.chunk * 2
    weight = torch.randn(columns, width, device=device, dtype=torch.bfloat16) / width**0.5
    head, pool = TeacherHead(weight=weight), PinnedPool()
    states = torch.randn(rows, width, device=device, dtype=torch.bfloat16) * 3
    logits = head(states)
    stores: dict[str, Callable[[], TeacherCache]] = {
        "logits": lambda: TeacherLogitCache.store(logits, pool=pool, donate=True),
        "hidden": lambda: TeacherHiddenCache.store(states, head, pool=pool, donate=True),
    }
    caches = {name: make() for name, make in stores.items()}

    def read(name: str) -> Call:
        def call() -> None:
            for start in range(0, rows, chunk):
                caches[name].fetch(start, min(rows, start + chunk))

        return call

    def keep(name: str) -> Call:
        return lambda: stores[name]().free()

    fetched = in_turns({name: read(name) for name in caches}, device, sizes.rounds)
    stored = in_turns({name: keep(name) for name in caches}, device, sizes.rounds)
    error = _difference(caches, rows, chunk)
    for name, cache in caches.items():
        yield {
            "part": "hidden",
            "arm": name,
            "width": width,
            "rows": rows,
            "cols": columns,
            "chunk": chunk,
            "row_bytes": cache.row_nbytes,
            "store_ms": stored[name],
            "fetch_ms": fetched[name],
            **(error if name == "hidden" else {}),
        }


def _difference(caches: dict[str, TeacherCache], rows: int, chunk: int) -> Row:
    """How far what is fetched is from the stored logits: in the numbers and as a divergence."""
    most = differ = divergence = 0.0
    for start in range(0, rows, chunk):
        end = min(rows, start + chunk)
        a, b = (caches[name].fetch(start, end) for name in ("hidden", "logits"))
        gap, size = (a.float() - b.float()).abs(), b.float().abs()
        # one unit in bf16's last place is 1/256 to 1/128 of a number
        most = max(most, float((gap / size.clamp(min=2.0**-6)).max()))
        differ += float((gap > 0).sum(dtype=torch.float64)) / (rows * gap.shape[1])
        divergence += float(vocab_parallel_kl_div(a, b, reverse=True).sum(dtype=torch.float64))
    return {"relative": most, "differ": differ, "kl": divergence / rows}
