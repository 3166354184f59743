"""Errors that a user can cause and mend, the exit codes of command lines, and phrases of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum


class InputError(ValueError):
    """Wrong input, as opposed to a fault of the program. The message is one line that says how to mend it."""


class UsageError(InputError):
    """A wrong flag or argument of a command line."""


class ConfigError(InputError):
    """A wrong setting; the message has the key, the value and a right one."""


class DatasetError(InputError):
    """A file that cannot be used as a data set; the message names it."""


class ImageError(InputError):
    """A file that is no readable picture; the message starts with its name."""


class VideoError(InputError):
    """A video that cannot be read or written; the message names it."""


class BadDataError(InputError):
    """Too many samples of the training data cannot be used."""


class CheckpointError(InputError):
    """A weight file that cannot be used: which file, what is wrong, what to do."""


class NonFiniteLossError(InputError, FloatingPointError):
    """A loss is infinite or NaN, more often than is allowed."""


class ArmError(InputError):
    """A wrong arm or seed of an experiment."""


class MeasurementError(InputError):
    """What was to be measured ran out of memory."""


class Preempted(Exception):  # noqa: N818
    """A run that was stopped by a signal, after it saved its state. The message is one line."""


#: What is reported by one line, without a traceback.
INPUT_ERRORS = (
    InputError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


class ExitCode(IntEnum):
    """Exit codes of the command lines."""

    OK = 0
    FAULT = 1
    WRONG_INPUT = 2
    #: Some inputs failed; the rest are done.
    SOME_FAILED = 3
    #: Stopped by a signal after saving (EX_TEMPFAIL): the same command goes on.
    STOPPED = 75
    INTERRUPTED = 130


def one_line(error: BaseException | str) -> str:
    """Return an error's message, or a text, without line breaks.

    An error without a message gives the name of its type, one of the system the file and the reason, and one
    that a data loader's worker passed on the last line of its traceback.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:
        text = re.sub(r"^(\w+\.)+\w+: ", "", text.splitlines()[-1])
    return " ".join(text.split()) or (error if isinstance(error, str) else type(error).__name__)


def listed(names: Iterable[object], most: int = 3, between: str = ", ") -> str:
    """Return the first names and, where there are over ``most``, how many follow: ``a, b, and 2 more``."""
    shown = [str(name) for name in names]
    more = [f"and {len(shown) - most} more"] if len(shown) > most else []
    return between.join([*shown[:most], *more])


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number and what it counts: ``1 image``, ``2 images``; by default an s makes the plural."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def quoted(names: Sequence[str]) -> str:
    """Return names in quotes, as a config file has them: ``"BN", "GN"``."""
    return ", ".join(f'"{name}"' for name in names)
