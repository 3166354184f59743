"""Checks of what belongs to what: ids that are used twice, and annotations of unknown images or classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    ERROR,
    WARNING,
    Found,
    annotations,
    error,
    label,
    warning,
    where,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import is_id


def _no_annotations(checked: CheckedFile) -> Found:
    if checked.file.annotations:
        return Found([])
    severity = ERROR if checked.training else WARNING
    return Found(where("image", checked.file.images, lambda _: True) or ["no image"], severity=severity)


def _repeated(unit: str, numbers: Iterable[Any]) -> list[str]:
    counts = Counter(number for number in numbers if is_id(number))
    if len(counts) == sum(counts.values()):
        return []
    return [label(unit, number) for number, times in counts.items() if times > 1]


def _category_name_twice(checked: CheckedFile) -> list[str]:
    names = Counter(c["name"] for c in checked.file.categories if isinstance(c.get("name"), str))
    return [label("category", name) for name, times in names.items() if times > 1]


def _unknown_image(checked: CheckedFile) -> list[str]:
    known = _known(checked.file.images)
    return wrong_annotations(checked, lambda a: a.image_id is not None and not known(a.image_id))


def _unknown_category(checked: CheckedFile) -> list[str]:
    known = _known(checked.file.categories)
    return wrong_annotations(checked, lambda a: a.category_id is not None and not known(a.category_id))


def _known(entries: Sequence[dict[str, Any]]) -> Callable[[Any], bool]:
    """Return a test for ids; text and its number are the same here, as their types are another finding."""
    numbers = {entry["id"] for entry in entries if is_id(entry.get("id"))}
    texts = {str(number) for number in numbers} | {str(entry.get("id")) for entry in entries}
    return lambda number: (is_id(number) and number in numbers) or str(number) in texts


CHECKS = {
    "no_annotations": error(
        "no annotation at all",
        "stops: no valid data found",
        "annotate, or export again with the annotations; a file to test on gives results without a score",
        _no_annotations,
    ),
    "duplicate_annotation_id": error(
        "annotation id used more than once",
        "stops: the ids are not unique",
        "number the annotations anew",
        lambda checked: _repeated("annotation", (a.id for a in checked.file.annotations)),
    ),
    "duplicate_image_id": error(
        "image id used more than once",
        "keeps the last of the images, and gives it the annotations of all",
        "give every image an id of its own, and correct image_id",
        lambda checked: _repeated("image", (image.get("id") for image in checked.file.images)),
    ),
    "duplicate_category_id": error(
        "category id used more than once",
        "keeps the last of the categories",
        "give every category an id of its own, and correct category_id",
        lambda checked: _repeated("category", (category.get("id") for category in checked.file.categories)),
    ),
    "category_name_twice": warning(
        "category name used more than once",
        "trains them as two classes, and shows the AP of one",
        "join the categories, or name them differently",
        _category_name_twice,
    ),
    "unknown_image": error(
        "annotation of an unknown image",
        "drops it",
        "add the image, or take the annotation out",
        _unknown_image,
    ),
    "unknown_category": error(
        "annotation of an unknown category",
        "stops with a KeyError when it loads the file",
        "add the category, or correct category_id",
        _unknown_category,
    ),
    "annotation_id_0": warning(
        "annotation id 0",
        "counts a found object of id 0 as not found in the evaluation, so that AP is too low",
        "number the annotations from 1",
        annotations(lambda a: a.id == 0 and is_id(a.id)),
    ),
}
