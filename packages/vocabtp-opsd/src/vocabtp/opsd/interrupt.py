"""Ctrl-C and SIGTERM: write a checkpoint of the last whole step, end all ranks with 128 + signal.

A handler only remembers the signal. The ranks compare what they remember before every micro-batch,
and at the end of a step with the numbers that they exchange anyway, so that all of them stop at the
same place, whichever of them was told to. A step that was under way leaves no trace: it is taken
again on resume.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# a terminal signals every process of the group, and torchrun passes the signal on once more
_REPEAT_SECONDS = 3.0


class InterruptFlag:
    """While entered, SIGINT and SIGTERM are remembered instead of ending the process.

    A second signal, a few seconds after the first, ends the process at once: someone who presses
    Ctrl-C again does not want to wait for the step. Outside the main thread, where Python takes no
    handlers, nothing is installed and the flag stays 0.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._since = signum, now
        elif now - self._since > _REPEAT_SECONDS:
            os._exit(128 + signum)
