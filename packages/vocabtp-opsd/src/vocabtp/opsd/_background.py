"""One piece of work at a time beside the main thread; its error comes when it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs a function in a thread of its own.

    Not `concurrent.futures`: its threads keep a process alive whose peers are gone.

    Args:
        work: What to run.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end; raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, at most so long; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
