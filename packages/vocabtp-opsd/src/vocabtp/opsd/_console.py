"""The two ways out to the user: answers on standard output, everything else on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Prints one answer."""
    stream = sys.stdout
    print(text, file=stream, flush=True)


def complain(text: str) -> None:
    """Prints one line about what went wrong."""
    stream = sys.stderr
    print(text, file=stream, flush=True)
