"""The two ways out to the user: answers on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str) -> None:
    """Prints one answer."""
    write_line(text, sys.stdout)


def complain(text: str) -> None:
    """Prints one line about what went wrong."""
    write_line(text, sys.stderr)


def write_line(text: str, stream: TextIO) -> None:
    """Writes the text and its newline in one piece.

    All ranks of a host share one pipe, and `print` writes the newline apart where Python does not
    buffer (`PYTHONUNBUFFERED`, usual under a cluster's launcher): two lines would run together.
    """
    stream.write(f"{text}\n")
    stream.flush()
