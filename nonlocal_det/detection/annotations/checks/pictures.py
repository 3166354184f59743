"""Checks of the pictures that a file names: are they there, readable, and as large as it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import ERROR, WARNING, Found, error, label
from nonlocal_det.detection.annotations.coco_file import has_size
from nonlocal_det.detection.annotations.image_files import Picture, missing_pictures


def _named(image: dict[str, Any]) -> str:
    return f"{label('image', image.get('id'))} {image['file_name']}"


outside_picture = error(
    "file_name that leads out of the image folder",
    "reads whatever file it names",
    "put the picture into the folder and correct file_name; or allow it by "
    "DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT True (check_dataset: --allow-outside)",
)(lambda checked: list(map(_named, checked.outside_images)))


@error(
    "image whose picture is not there",
    "stops with a FileNotFoundError when it comes to the image",
    "correct file_name, which is the path from the image folder, or the folder",
)
def missing_picture(checked: CheckedFile) -> Found:
    if checked.folder is None:
        return Found([])
    missing = missing_pictures(checked.named_images, checked.folder)
    what = "image whose picture is not there"
    return _bad_pictures(checked, what, list(map(_named, missing)), len(checked.named_images))


@error(
    "picture that cannot be read",
    "stops with an error when it comes to the image",
    "replace the picture, or take the image out of the file",
)
def unreadable_picture(checked: CheckedFile) -> Found:
    bad = [f"{_named(p.image)}: {p.problem}" for p in checked.pictures if p.problem is not None]
    return _bad_pictures(checked, "picture that cannot be read", bad, len(checked.pictures))


def _bad_pictures(checked: CheckedFile, what: str, found: Sequence[str], looked_at: int) -> Found:
    """Say what comes of pictures that are of no use, of those that were looked at."""
    if checked.max_bad_fraction is None:
        return Found(found)
    # One or two of a sample of 50 say little of the whole.
    too_many = len(found) > max(2, checked.max_bad_fraction * looked_at) or len(found) == looked_at
    return Found(
        found,
        f"{what} (training takes another in its place, up to DATALOADER.MAX_BAD_FRACTION "
        f"{checked.max_bad_fraction} of all; here {len(found)} of {looked_at})",
        severity=ERROR if too_many else WARNING,
    )


@error(
    "picture of another size than the file says",
    "stops with a SizeMismatchError when it comes to the image",
    "write the size of the picture, and check that the annotations fit to it",
)
def picture_size(checked: CheckedFile) -> Found:
    wrong = [p for p in checked.pictures if p.size is not None and _says_otherwise(p)]
    turned = [p for p in wrong if p.turned and p.size == (p.image["height"], p.image["width"])]
    fix = "annotate the picture upright, as its EXIF orientation turns it, or take the orientation out of it"
    return Found(
        [
            f"{label('image', p.image.get('id'))} {p.image['width']} x {p.image['height']}, is "
            f"{p.size[0]} x {p.size[1]}{' by its EXIF orientation' if p.turned else ''}"
            for p in wrong
        ],
        fix=fix if turned else None,
    )


def _says_otherwise(picture: Picture) -> bool:
    return has_size(picture.image) and picture.size != (picture.image["width"], picture.image["height"])
