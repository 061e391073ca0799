"""Errors that tell a user what to change: one message each, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something in the user's input has to change; the message says what, and where.

    The command line prints the message without a traceback and ends with exit code 2. A message
    is one line; only a list of broken data lines takes several.
    """


class ConfigError(UserError, ValueError):
    """A key, a value or a combination of values in the configuration cannot be used."""


class DataError(UserError, ValueError):
    """A prompt file cannot be used; the message names the file and the physical lines."""


class ModelError(UserError, ValueError):
    """A model or tokenizer is missing, broken, or does not fit its partner or the layout."""


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be used for this run."""


class NotFiniteError(UserError, ArithmeticError):
    """Too many steps in a row had a loss or a gradient norm that is NaN or infinite."""


class DeviceMemoryError(UserError, MemoryError):
    """Memory ran out; the message names the phase and the keys that make it smaller."""


class RankLostError(Exception):
    """Another rank is gone, and this one cannot go on without it."""


class Interrupted(Exception):
    """A signal ended the run in good order; what was reached is saved.

    Args:
        signum: The signal; the command's exit code is 128 plus it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum
