"""What the command-line tools share: flags, and wrong input as one line and an exit code."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NoReturn, ParamSpec

import nonlocal_det
from nonlocal_det.errors import INPUT_ERRORS, ExitCode, Preempted, UsageError, one_line

P = ParamSpec("P")


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make a tool's ``main`` report wrong input by one line on stderr, without a traceback.

    Other exceptions are faults of the program and pass through with their traceback.

    Args:
        main: does the work; None means success.

    Returns:
        A function that returns the exit code: what ``main`` returned or 0, 2 for wrong input, 75 where a
        signal has stopped it (:class:`~nonlocal_det.errors.Preempted`), 130 after Ctrl-C.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except SystemExit as stop:  # --help, and what the libraries end by
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Preempted as stopped:
            print(stopped, file=sys.stderr)
            return ExitCode.STOPPED
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return ExitCode.INTERRUPTED
        except INPUT_ERRORS as error:
            return _report(one_line(error))
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "detectron2":
                raise
            missing = find_spec("detectron2") is None
            return _report(nonlocal_det.DETECTRON2_MISSING if missing else str(error))

    return run


def make_parser(tool: str, description: str) -> argparse.ArgumentParser:
    """Return the parser, without flags, of the tool that a module in this package is."""
    return argparse.ArgumentParser(prog=f"python -m nonlocal_det.tools.{tool}", description=description)


def add_opts(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--opts``, which takes the rest of the line: overrides of a config. ``what`` is its help."""
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE", help=what)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what is wrong with it is raised as one line, not printed after the usage.

    ``argv`` lacks the program's name; it is that of this process by default.

    Raises:
        UsageError: an argument is wrong.
    """

    def error(message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")

    parser.error = error  # type: ignore[method-assign]
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Read a flag that counts something, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _report(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    return ExitCode.WRONG_INPUT
