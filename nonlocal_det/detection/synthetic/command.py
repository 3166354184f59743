"""What the built-in data sets of drawn scenes share: writing them, and their command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from nonlocal_det.detection.annotations.coco_writer import write_coco
from nonlocal_det.media.canvas import DRAWING_VERSION

Scene = tuple[np.ndarray, list[dict[str, Any]]]
"""An RGB picture, uint8 [height, width, 3], and its COCO annotations without ids."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclass(frozen=True)
class SceneSet:
    """A kind of scenes, and how sets of them are written."""

    module: str  # that of the command line
    draw: Callable[[int, int, int], Scene]  # of the side of the picture, the seed and the picture's index
    categories: list[dict[str, Any]]  # COCO's
    description: str  # of a set, in COCO's "info"
    help: str  # what --help says that the command does
    size: int  # default side of a picture in pixels
    sizes: tuple[int, int]  # smallest and largest side

    def write(self, directory: Path, *, count: int, size: int, seed: int, label: str = "") -> None:
        """Write scenes as a COCO-format data set: ``annotations.json`` and ``images/*.png``.

        Picture i depends on ``seed``, ``size`` and i alone, so a smaller set is the beginning of a larger
        one. A progress bar goes to stderr.

        Args:
            directory: where to write.
            count: number of pictures, at least 1.
            size: side of the pictures in pixels.
            seed: not negative.
            label: what the progress bar calls the set; the directory by default.

        Raises:
            ValueError: a number is out of range; the message starts with its name.
            OSError: something could not be written.
        """
        low, high = self.sizes
        if count < 1:
            raise ValueError(f"count is {count}: give the number of pictures, 1 or more")
        if not low <= size <= high:
            raise ValueError(f"size is {size}: give the side of the pictures in pixels, {low} to {high}")
        if seed < 0:
            raise ValueError(f"seed is {seed}: give an integer that is 0 or more")
        indices = tqdm(
            range(count), desc=label or str(directory), unit="picture", file=sys.stderr, mininterval=0.5
        )
        description = f"{self.description} (nonlocal_det)"
        info = {"description": description, "version": str(DRAWING_VERSION), "seed": seed}
        write_coco(directory, (self.draw(size, seed, index) for index in indices), self.categories, info)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Write a set to a folder, as the command line says; return the exit code."""
        parser = _Parser(prog=f"python -m {self.module}", description=self.help)
        add = parser.add_argument
        add("--output", metavar="DIR", type=Path, required=True, help="new or empty folder")
        add("--count", metavar="N", type=int, default=100, help="number of pictures (%(default)s)")
        size_help = f"side of a picture in pixels, {self.sizes[0]} to {self.sizes[1]} (%(default)s)"
        add("--size", metavar="PX", type=int, default=self.size, help=size_help)
        add("--seed", metavar="S", type=int, default=0, help="0 or more (%(default)s)")
        args = parser.parse_args(argv)

        output: Path = args.output
        try:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                parser.error(f"--output {output} is not an empty folder: give a new or an empty one")
            self.write(output, count=args.count, size=args.size, seed=args.seed)
        except ValueError as error:
            parser.error(f"--{error}")
        except OSError as error:
            parser.error(f"--output {output} cannot be written: {error}")
        print(f"wrote {args.count} pictures to {output}")
        return 0
