"""The two ways out to the user: answers on standard output, everything else on standard error."""

from __future__ import annotations

import logging
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


class Notices(logging.Filter):
    """Lets each notice through once: the inputs are read by the command and again by the run.

    Attributes:
        heard: Whether someone else has shown what comes now, so that it is only remembered.
    """

    def __init__(self, heard: bool) -> None:
        super().__init__()
        self.heard = heard
        self._known: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._known
        self._known.add(text)
        return new and not self.heard
