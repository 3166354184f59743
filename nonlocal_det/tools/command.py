"""What every command-line tool does with wrong input: one line, and exit code 2."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, ParamSpec

__all__ = ["UsageError", "command", "parse", "positive"]

P = ParamSpec("P")


class UsageError(ValueError):
    """A wrong flag or argument. The message is one line."""


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make a tool's ``main`` report wrong input by one line on stderr, without a traceback.

    Other exceptions are faults of the program and pass through with their traceback.

    Args:
        main: does the work; None means success.

    Returns:
        A function that returns the exit code: what ``main`` returned or 0, 2 for wrong input, 130 after
        Ctrl-C.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UsageError as error:
            return _report(str(error))
        except SystemExit as stop:  # --help, and what the libraries end by
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "detectron2":
                raise
            import nonlocal_det

            if hasattr(nonlocal_det, "DETECTRON2_MISSING"):
                return 2  # the import of the package has said it
            return _report(str(error))
        except Exception as error:
            from nonlocal_det.engine import INPUT_ERRORS

            if not isinstance(error, INPUT_ERRORS):
                raise
            return _report(_one_line(error))

    return run


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is wrong with it is raised as one line, not printed after the usage.

    Args:
        parser: the tool's parser.
        argv: arguments without the program's name; those of this process by default.

    Raises:
        UsageError: an argument is wrong.
    """

    def error(message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")

    parser.error = error  # type: ignore[method-assign]
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Read a flag that counts something, 1 or more.

    Raises:
        ArgumentTypeError: it is not that.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _report(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # from a data loader's worker
        text = re.sub(r"^(\w+\.)+\w+: ", "", text.splitlines()[-1])
    return " ".join(text.split()) or type(error).__name__
