"""Ids: which columns they are, and how an id that is no token is reported on all ranks alike.

A rank's bad id travels in the gather of the statistics, one value a row, so that every rank knows
of it without a collective of its own. Ids on the CPU are reported at once. Ids on an accelerator
are not waited for: the row is NaN, and the error is raised at the next call of this package or by
`check_ids()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# what a column below 0 means
ELSEWHERE = -1  # a token of another rank's shard
IGNORED = -2
BAD = -3

# integers up to here survive fp32
_EXACT = 2**24


class Resolved(NamedTuple):
    """Ids as this shard sees them."""

    columns: Tensor  # [N, K] int64: a column of this shard, or one of the codes above
    bad: Tensor  # [1, N] 0, or the row's first bad id, shifted by one if it is not negative


def resolve(
    ids: Tensor,
    ignore_index: int,
    vocab_start: int,
    width: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> Resolved:
    """Sort ids `[N, K]` into columns of this shard, other shards' tokens, ignored and bad ones."""
    ids = ids.to(torch.int64)
    ignored = ids == ignore_index
    bad = ~ignored & ((ids < 0) | (ids >= vocab_size))
    local = ids - vocab_start
    columns = torch.where((local >= 0) & (local < width), local, ELSEWHERE)
    columns = columns.masked_fill(ignored, IGNORED).masked_fill(bad, BAD)
    if ids.shape[1] == 0:
        return Resolved(columns, torch.zeros(1, ids.shape[0], dtype=dtype, device=ids.device))
    # the first bad id of a row; never 0, whatever the id
    first = bad.to(torch.int8).argmax(1, keepdim=True)
    code = ids.gather(1, first)
    code = torch.where(code >= 0, code + 1, code) * bad.gather(1, first)
    return Resolved(columns, code.t().to(dtype))


class Report(NamedTuple):
    """Everything an error message needs besides the flags themselves."""

    name: str
    lead: tuple[int, ...]  # leading shape of the logits
    ignore_index: int
    vocab_size: int

    def message(self, codes: Tensor) -> str:
        """The error for gathered codes `[R, N]`, the same text on every rank."""
        hit = codes != 0
        ranks, rows = hit.nonzero(as_tuple=True)
        rank, row = int(ranks[0]), int(rows[0])
        code = int(codes[rank, row])
        value = str(code - 1 if code > 0 else code)
        if abs(code) >= _EXACT:
            value = "far outside of it"
        place: list[int] = []
        for size in reversed(self.lead):
            row, at = divmod(row, size)
            place.insert(0, at)
        who = f" on rank {rank}" if codes.shape[0] > 1 else ""
        return (
            f"{self.name}: an id must be in [0, {self.vocab_size}) or equal ignore_index "
            f"({self.ignore_index}), got {value} at position {place}{who}; "
            f"{int(hit.any(0).sum())} of {codes.shape[1]} rows have such an id"
        )


class _Pending(NamedTuple):
    wait: Callable[[], None]
    codes: Tensor
    report: Report


_lock = threading.Lock()
_pending: list[_Pending] = []


def report_now(codes: Tensor, report: Report) -> None:
    """Raise if a rank has a bad id; `codes` `[R, N]` are the gathered flags."""
    if bool((codes != 0).any()):
        raise ValueError(report.message(codes.cpu()))


def report_later(codes: Tensor, report: Report) -> None:
    """Remember the flags without waiting for the device."""
    if codes.device.type == "cpu":
        pending = _Pending(lambda: None, codes, report)
    else:
        host = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
        host.copy_(codes, non_blocking=True)
        event = torch.Event(device=codes.device)
        event.record(torch.accelerator.current_stream(codes.device))
        pending = _Pending(event.synchronize, host, report)
    with _lock:
        _pending.append(pending)


def check_ids() -> None:
    """Raise the ValueError of an earlier call whose ids were not tokens, if there is one.

    Ids on an accelerator are checked without waiting for it. Every op of the package reports what
    an earlier call left; this function does so without an op, for the end of a loop. It waits for
    the calls in question and no longer.

    Raises:
        ValueError: an id outside of `[0, V)` that is not `ignore_index`, the same on every rank.
    """
    with _lock:
        found, _pending[:] = list(_pending), []
    for pending in found:
        pending.wait()
        report_now(pending.codes, pending.report)
