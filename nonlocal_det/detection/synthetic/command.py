"""What the built-in data sets of drawn scenes share: their command line, checks and progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from tqdm import tqdm

__all__ = ["SceneWriter", "check_numbers", "draw_scenes", "scene_command"]

Scene = tuple[np.ndarray, list[dict[str, Any]]]
"""An RGB picture, uint8 [height, width, 3], and its COCO annotations without ids."""


class SceneWriter(Protocol):
    """Writes a data set of scenes to a folder."""

    def __call__(self, directory: Path, *, count: int, size: int, seed: int, label: str) -> None:
        """Write ``count`` pictures of ``size`` x ``size`` pixels drawn from ``seed``.

        Raises:
            ValueError: a number is out of range; the message starts with its name.
            OSError: something could not be written.
        """


def check_numbers(*, count: int, size: int, seed: int, sizes: tuple[int, int]) -> None:
    """Check what a data set consists of.

    Args:
        count: number of pictures, at least 1.
        size: side of the pictures in pixels.
        seed: not negative.
        sizes: smallest and largest side.

    Raises:
        ValueError: a number is out of range; the message starts with its name.
    """
    if count < 1:
        raise ValueError(f"count is {count}: give the number of pictures, 1 or more")
    if not sizes[0] <= size <= sizes[1]:
        raise ValueError(f"size is {size}: give the side of the pictures in pixels, {sizes[0]} to {sizes[1]}")
    if seed < 0:
        raise ValueError(f"seed is {seed}: give an integer that is 0 or more")


def draw_scenes(draw: Callable[[int], Scene], count: int, label: str) -> Iterator[Scene]:
    """Yield ``draw(0)`` to ``draw(count - 1)``, with a progress bar named ``label`` on stderr."""
    for index in tqdm(range(count), desc=label, unit="picture", file=sys.stderr, mininterval=0.5):
        yield draw(index)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def scene_command(
    write: SceneWriter,
    *,
    prog: str,
    description: str,
    size: int,
    sizes: tuple[int, int],
    argv: Sequence[str] | None = None,
) -> int:
    """Write a set of scenes to a folder, as the command line says.

    Args:
        write: draws and writes the set.
        prog: name of the command.
        description: what --help says that it does.
        size: default side of a picture in pixels.
        sizes: smallest and largest side.
        argv: command line without the program's name; ``sys.argv`` by default.

    Returns:
        0, or 2 after wrong input.
    """
    parser = _Parser(prog=prog, description=description)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="new or empty folder")
    parser.add_argument(
        "--count", metavar="N", type=int, default=100, help="number of pictures (%(default)s)"
    )
    size_help = f"side of a picture in pixels, {sizes[0]} to {sizes[1]} (%(default)s)"
    parser.add_argument("--size", metavar="PX", type=int, default=size, help=size_help)
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="0 or more (%(default)s)")
    args = parser.parse_args(argv)

    output: Path = args.output
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            parser.error(f"--output {output} is not an empty folder: give a new or an empty one")
        write(output, count=args.count, size=args.size, seed=args.seed, label=str(output))
    except ValueError as error:
        parser.error(f"--{error}")
    except OSError as error:
        parser.error(f"--output {output} cannot be written: {error}")
    print(f"wrote {args.count} pictures to {output}")
    return 0
