"""What the built-in data sets of drawn scenes share: writing them, and their command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from nonlocal_det.detection.annotations.coco_writer import write_coco
from nonlocal_det.media.canvas import DRAWING_VERSION

__all__ = ["Scene", "scene_command", "write_scenes"]

Scene = tuple[np.ndarray, list[dict[str, Any]]]
"""An RGB picture, uint8 [height, width, 3], and its COCO annotations without ids."""


def write_scenes(
    directory: Path,
    draw: Callable[[int], Scene],
    categories: list[dict[str, Any]],
    description: str,
    *,
    count: int,
    size: int,
    seed: int,
    sizes: tuple[int, int],
    label: str,
) -> None:
    """Write scenes as a COCO-format data set, with a progress bar on stderr.

    Args:
        directory: where to write.
        draw: draws the scene of an index, 0 to ``count`` - 1.
        categories: COCO's "categories".
        description: that of the set.
        count: number of pictures, at least 1.
        size: side of the pictures in pixels.
        seed: not negative.
        sizes: smallest and largest side.
        label: what the progress bar calls the set.

    Raises:
        ValueError: a number is out of range; the message starts with its name.
        OSError: something could not be written.
    """
    if count < 1:
        raise ValueError(f"count is {count}: give the number of pictures, 1 or more")
    if not sizes[0] <= size <= sizes[1]:
        raise ValueError(f"size is {size}: give the side of the pictures in pixels, {sizes[0]} to {sizes[1]}")
    if seed < 0:
        raise ValueError(f"seed is {seed}: give an integer that is 0 or more")
    indices = tqdm(range(count), desc=label, unit="picture", file=sys.stderr, mininterval=0.5)
    info = {"description": f"{description} (nonlocal_det)", "version": str(DRAWING_VERSION), "seed": seed}
    write_coco(directory, map(draw, indices), categories, info)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def scene_command(
    write: Callable[..., None],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    size: int,
    sizes: tuple[int, int],
) -> int:
    """Write a set of scenes to a folder, as the command line says.

    Args:
        write: writes the set to a folder; takes "count", "size", "seed" and "label" as :func:`write_scenes`.
        argv: command line without the program's name; ``sys.argv`` by default.
        prog: name of the command.
        description: what --help says that it does.
        size: default side of a picture in pixels.
        sizes: smallest and largest side.

    Returns:
        0, or 2 after wrong input.
    """
    parser = _Parser(prog=prog, description=description)
    add = parser.add_argument
    add("--output", metavar="DIR", type=Path, required=True, help="new or empty folder")
    add("--count", metavar="N", type=int, default=100, help="number of pictures (%(default)s)")
    size_help = f"side of a picture in pixels, {sizes[0]} to {sizes[1]} (%(default)s)"
    add("--size", metavar="PX", type=int, default=size, help=size_help)
    add("--seed", metavar="S", type=int, default=0, help="0 or more (%(default)s)")
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
