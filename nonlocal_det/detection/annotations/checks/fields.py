"""Checks of single fields: missing keys, wrong types, values that Detectron2 does not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    Finder,
    Found,
    annotations,
    error,
    needed_for_training,
    not_crowd,
    warning,
    where,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import has_size, is_box, is_id, is_number


def _missing_key(checked: CheckedFile) -> Found:
    keys: set[str] = set()

    def lacks(needed: Sequence[str], values: Sequence[Any]) -> bool:
        absent = [key for key, value in zip(needed, values, strict=True) if value is None]
        keys.update(absent)
        return bool(absent)

    of_annotation = ("id", "image_id", "category_id", "bbox")
    found = wrong_annotations(
        checked,  # The first test is there for speed.
        lambda a: None in a[:4] and lacks(of_annotation, (a.id, a.image_id, a.category_id, a.bbox)),
    )
    for unit, entries, needed in (
        ("image", checked.file.images, ("id", "file_name", "width", "height")),
        ("category", checked.file.categories, ("id", "name")),
    ):
        found += where(unit, entries, lambda e, needed=needed: lacks(needed, [e.get(key) for key in needed]))
    return Found(found, f"missing key{'s' if len(keys) > 1 else ''} {', '.join(sorted(keys))}")


def _ids(wrong: Callable[[Any], bool]) -> Finder:
    """Return a finder of the entries of which an id is wrong."""

    def find(checked: CheckedFile) -> list[str]:
        found = where("image", checked.file.images, lambda image: wrong(image.get("id")))
        found += where("category", checked.file.categories, lambda category: wrong(category.get("id")))
        return found + wrong_annotations(
            checked, lambda a: wrong(a.id) or wrong(a.image_id) or wrong(a.category_id)
        )

    return find


def _id_type(checked: CheckedFile) -> Found:
    found = _ids(lambda value: value is not None and not is_id(value))(checked)
    lost, of = _lost_by_type(checked) if found else 0, len(checked.file.annotations)
    belong = f"{lost} of {of} annotations {'belongs' if lost == 1 else 'belong'} to no image"
    return Found(found, f"id that is no whole number from 0 up, so that {belong}" if lost else None)


def _lost_by_type(checked: CheckedFile) -> int:
    """Count the annotations that would have an image if text and its number were the same."""

    def typed(value: Any) -> tuple[bool, str]:
        return isinstance(value, str), str(value)

    exact = {typed(image.get("id")) for image in checked.file.images}
    loose = {str(image.get("id")) for image in checked.file.images}
    return sum(typed(a.image_id) not in exact and str(a.image_id) in loose for a in checked.file.annotations)


def _no_text(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


def _no_size(image: dict[str, Any]) -> bool:
    return image.get("width") is not None and image.get("height") is not None and not has_size(image)


def _no_area(area: Any) -> bool:
    return area is not None and not (is_number(area) and area >= 0)


def _no_flag(value: Any) -> bool:
    return value is not None and not (type(value) in (int, float, bool) and value in (0, 1))


def _all_crowd(checked: CheckedFile) -> Found:
    return Found([]) if any(map(not_crowd, checked.file.annotations)) else needed_for_training(checked)


CHECKS = {
    "missing_key": error(
        "missing key",
        "stops with a KeyError when it loads the file, or comes to the image",
        "an image needs id, file_name, width, height; an annotation id, image_id, category_id, bbox; a "
        "category id, name",
        _missing_key,
    ),
    "id_type": error(
        "id that is no whole number from 0 up",
        "takes text and the same number for different ids, and drops what belongs to no image",
        "write every id, image_id and category_id as a number",
        _id_type,
    ),
    "float_id": warning(
        "id with a decimal point",
        "takes 3.0 for 3",
        "write whole numbers",
        _ids(lambda value: type(value) is float and is_id(value)),
    ),
    "image_size_type": error(
        "image whose width or height is no positive number",
        "stops with a SizeMismatchError when it comes to the image",
        "write width and height in pixels",
        lambda checked: where("image", checked.file.images, _no_size),
    ),
    "file_name_type": error(
        "image whose file_name is no text",
        "stops with a TypeError when it loads the file",
        "write the path from the image folder",
        lambda checked: where("image", checked.file.images, lambda x: _no_text(x.get("file_name"))),
    ),
    "category_name_type": error(
        "category whose name is no text",
        "trains, and stops with a TypeError in the evaluation",
        "write the name in quotes",
        lambda checked: where("category", checked.file.categories, lambda x: _no_text(x.get("name"))),
    ),
    "box_type": error(
        "bbox that is no list of 4 finite numbers",
        "stops with an error when it comes to the image, or drops the object",
        "write [x, y, width, height] in pixels",
        annotations(lambda a: a.bbox is not None and not is_box(a.bbox)),
    ),
    "area_type": error(
        "area that is no number from 0 up",
        "stops with an error in the evaluation",
        "write the number of pixels of the mask, or leave the key out",
        annotations(lambda a: _no_area(a.area)),
    ),
    "area_missing": warning(
        "area missing",
        "trains, and stops with a KeyError in the evaluation",
        "write the number of pixels of the mask, or else of the box",
        annotations(lambda a: a.area is None),
    ),
    "iscrowd_value": error(
        "iscrowd that is neither 0 nor 1",
        "takes all but 0 for a crowd, which it does not train on",
        "write 0 for single objects, 1 for crowds",
        annotations(lambda a: _no_flag(a.iscrowd)),
    ),
    "iscrowd_bool": warning(
        "iscrowd that is true or false",
        "takes false for 0 and true for 1",
        "write 0 or 1",
        annotations(lambda a: isinstance(a.iscrowd, bool)),
    ),
    "iscrowd_missing": warning(
        "iscrowd missing",
        "trains with 0, and stops with a KeyError in the evaluation",
        "write 0 for single objects, 1 for crowds",
        annotations(lambda a: a.iscrowd is None),
    ),
    "all_crowd": error(
        "every annotation is crowd, so that training would see none",
        "stops: no valid data found",
        "write iscrowd 0 for single objects (CVAT writes 1 with every mask that is not a polygon)",
        _all_crowd,
    ),
    "ignore": error(
        "annotation to be ignored",
        'stops: "ignore" is not supported',
        "take it out, or write iscrowd 1, which neither training nor evaluation holds against the model",
        annotations(lambda a: a.ignore),
    ),
}
