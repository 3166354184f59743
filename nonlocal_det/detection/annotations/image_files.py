"""Comparing the images of an annotation file with the pictures on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nonlocal_det.errors import ImageError
from nonlocal_det.media.image import image_errors, open_image, read_image

_ORIENTATION = 0x0112  # of EXIF; 5 to 8 turn the picture by a quarter


@dataclass(frozen=True)
class Picture:
    """One image of an annotation file, as it is on disk."""

    image: dict[str, Any]  # its entry in the file
    problem: str | None = None  # why it cannot be read
    size: tuple[int, int] | None = (
        None  # width and height as a person, and Detectron2, sees it, if it is read
    )
    turned: bool = False  # whether its EXIF orientation exchanges width and height


def missing_pictures(
    images: Sequence[dict[str, Any]], folder: str | os.PathLike[str]
) -> list[dict[str, Any]]:
    """Return the images, entries with a "file_name" that starts at ``folder``, whose picture is not there."""

    @cache  # each folder is listed once, which is fast on network drives too
    def names(parent: str) -> set[str]:
        try:
            return set(os.listdir(parent))
        except (OSError, ValueError):
            return set()

    split = [os.path.split(os.path.join(folder, image["file_name"])) for image in images]
    return [image for image, (parent, name) in zip(images, split, strict=True) if name not in names(parent)]


def look_at(
    images: Sequence[dict[str, Any]],
    folder: str | os.PathLike[str],
    *,
    sample: int | None = None,
    decode: int = 0,
) -> list[Picture]:
    """Open the pictures of images that have one.

    Args:
        images: entries with a "file_name", which starts at ``folder``.
        folder: where the pictures are.
        sample: open this many, evenly spaced; None opens all.
        decode: read this many to their end, evenly spaced: a picture cut short has a sound header.
    """
    chosen = _spread(images, sample)
    decoded = {id(image) for image in _spread(chosen, decode)}
    pictures = []
    for image in chosen:
        path = os.path.join(folder, image["file_name"])
        if os.path.exists(path):
            pictures.append(_look(image, path, id(image) in decoded))
    return pictures


def _spread(images: Sequence[dict[str, Any]], number: int | None) -> list[dict[str, Any]]:
    if number is None or number >= len(images):
        return list(images)
    return [images[i] for i in np.linspace(0, len(images) - 1, number).astype(int)]


def _look(image: dict[str, Any], path: str, decode: bool) -> Picture:
    try:
        if decode:
            read_image(path)
        with image_errors(path), open_image(path) as opened:
            width, height = opened.size
            turned = opened.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    except ImageError as error:
        return Picture(image, str(error).removeprefix(f"{path}: "))
    return Picture(image, size=(height, width) if turned else (width, height), turned=turned)
