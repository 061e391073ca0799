"""How an id that is no token is reported on all ranks alike, and without waiting for a device.

A rank's bad id travels in the gather of the statistics, one value a row, so that every rank knows
of it without a collective of its own. Ids on the CPU are reported at once. Ids on an accelerator
are not waited for: the row is NaN, and the error is raised at the next call of this package or by
`check_ids()`. That next call waits for the kernel that knows, always: a rank that only looked would
raise at another call than its peers.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from vocabtp.kernels import _flags

# integers up to here survive fp32
_EXACT = 2**24


class Bounds(NamedTuple):
    """Which ids are which columns."""

    ignore_index: int
    vocab_start: int
    vocab_size: int


class Report(NamedTuple):
    """Everything an error message needs besides the flags themselves."""

    name: str
    lead: tuple[int, ...]  # leading shape of the logits
    bounds: Bounds

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
            f"{self.name}: an id must be in [0, {self.bounds.vocab_size}) or equal ignore_index "
            f"({self.bounds.ignore_index}), got {value} at position {place}{who}; "
            f"{int(hit.any(0).sum())} of {codes.shape[1]} rows have such an id"
        )


class Watch:
    """A call whose ids are not looked at before the device knows of them.

    Whoever runs the kernel that knows every rank's bad ids gives it `cell` to store a 1 to, and
    calls `known` behind it, on the same stream.
    """

    def __init__(self, report: Report, device: torch.device) -> None:
        self.report = report
        self.device = device
        self.captured = _flags.capturing(device)
        self._flag = _flags.take(device)
        self._codes: Tensor | None = None

    @property
    def cell(self) -> Tensor | None:
        """One int32 that a kernel can store to, if there is any."""
        return self._flag.cell if self._flag is not None and self._flag.mapped else None

    def known(self, codes: Tensor, *, stored: bool = False) -> None:
        """`codes` `[R, N]` are all ranks'; `stored` if the kernel that found them took `cell`."""
        self._codes = codes
        if self._flag is not None:
            if not stored:
                up = (codes != 0).any().to(torch.int32).view(1)
                self._flag.cell.copy_(up, non_blocking=True)
            if not self.captured:
                self._flag.settled()

    def close(self, *, now: bool) -> None:
        """Report `now`, or leave the call to the next check; a captured one to explicit checks."""
        if self._codes is None:  # no rows
            if self._flag is not None:
                _flags.give(self._flag)
        elif now and not self.captured:
            _raise_first([self])
        elif self._flag is not None or not _flags.raised_by(self.device):
            with _lock:
                (_captured if self.captured else _pending).append(self)

    def error(self) -> ValueError | None:
        """Waits until it is known whether there is a bad id; what to raise if there is."""
        assert self._codes is not None
        if self._flag is None:
            up = bool((self._codes != 0).any())
        else:
            if not self.captured:
                self._flag.wait()
            up = self._flag.lower()
            if not self.captured:
                _flags.give(self._flag)
        return ValueError(self.report.message(self._codes.cpu())) if up else None


_lock = threading.Lock()
_pending: list[Watch] = []
_captured: list[Watch] = []


def report_now(codes: Tensor, report: Report) -> None:
    """Raise if a rank has a bad id; `codes` `[R, N]` are the gathered flags."""
    if bool((codes != 0).any()):
        raise ValueError(report.message(codes.cpu()))


def _raise_first(found: list[Watch]) -> None:
    errors = [watch.error() for watch in found]
    for error in errors:
        if error is not None:
            raise error


def check_earlier() -> None:
    """What every op does first: `check_ids` for the calls that ran since the last check."""
    with _lock:
        if not _pending or any(_flags.capturing(d) for d in {w.device for w in _pending}):
            return
        found, _pending[:] = list(_pending), []
    _raise_first(found)


def check_ids() -> None:
    """Raise the ValueError of an earlier call whose ids were not tokens, if there is one.

    Ids on an accelerator are checked without waiting for it. Every op of the package reports what
    an earlier call of the process left, of any thread; this function does so without an op, for the
    end of a loop. It waits for the calls in question and no longer.

    A call that is captured in a CUDA graph reports nothing while it is captured, whatever its
    `validate_ids`. After a replay its rows are NaN as ever, and this function, but no op, reports
    them: it waits for the whole device if there are such graphs. A captured call is remembered,
    with one number a row, as long as the process lives, since nothing tells when its graph is gone.
    The memory for reports must be there before a capture begins: a process whose very first call of
    the package is captured, or which captures more than 256 such calls with none in between that
    is not, gets the NaN alone. So run a step before you capture one, as PyTorch advises anyway.
    While the current stream is captured this function does nothing.

    Raises:
        ValueError: an id outside of `[0, V)` that is not `ignore_index`, the same on every rank.
    """
    check_earlier()
    with _lock:
        found = list(_captured)
    devices = {watch.device for watch in found}
    if any(_flags.capturing(device) for device in devices):
        return
    for device in devices:
        torch.accelerator.synchronize(device)
    _raise_first(found)
