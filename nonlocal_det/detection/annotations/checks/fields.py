"""Checks of keys and values: what is missing, of a wrong type, used twice, or belongs to nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    ERROR,
    WARNING,
    Finder,
    Found,
    annotations,
    error,
    label,
    none_right,
    not_crowd,
    warning,
    where,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import Annotation, has_size, is_box, is_id, is_number


@error(
    "missing key",
    "stops with a KeyError when it loads the file, or comes to the image",
    "an image needs id, file_name, width, height; an annotation id, image_id, category_id, bbox; a "
    "category id, name",
)
def missing_key(checked: CheckedFile) -> Found:
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


def _images(key: str, wrong: Callable[[Any], bool]) -> Finder:
    return lambda checked: where("image", checked.file.images, lambda image: wrong(image.get(key)))


def _categories(key: str, wrong: Callable[[Any], bool]) -> Finder:
    return lambda checked: where("category", checked.file.categories, lambda entry: wrong(entry.get(key)))


def _ids(checked: CheckedFile, wrong: Callable[[Any], bool]) -> list[str]:
    """Name the entries of which an id is wrong."""
    found = [*_images("id", wrong)(checked), *_categories("id", wrong)(checked)]
    return found + wrong_annotations(
        checked, lambda a: wrong(a.id) or wrong(a.image_id) or wrong(a.category_id)
    )


@error(
    "id that is no whole number from 0 up",
    "takes text and the same number for different ids, and drops what belongs to no image",
    "write every id, image_id and category_id as a number",
)
def id_type(checked: CheckedFile) -> Found:
    found = _ids(checked, lambda value: value is not None and not is_id(value))
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


float_id = warning("id with a decimal point", "takes 3.0 for 3", "write whole numbers")(
    lambda checked: _ids(checked, lambda value: type(value) is float and is_id(value))
)

image_size_type = error(
    "image whose width or height is no positive number",
    "stops with a SizeMismatchError when it comes to the image",
    "write width and height in pixels",
)(lambda checked: where("image", checked.file.images, _no_size))


def _no_size(image: dict[str, Any]) -> bool:
    return image.get("width") is not None and image.get("height") is not None and not has_size(image)


def _no_text(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


file_name_type = error(
    "image whose file_name is no text",
    "stops with a TypeError when it loads the file",
    "write the path from the image folder",
)(_images("file_name", _no_text))

category_name_type = error(
    "category whose name is no text",
    "trains, and stops with a TypeError in the evaluation",
    "write the name in quotes",
)(_categories("name", _no_text))

box_type = error(
    "bbox that is no list of 4 finite numbers",
    "stops with an error when it comes to the image, or drops the object",
    "write [x, y, width, height] in pixels",
)(annotations(lambda a: a.bbox is not None and not is_box(a.bbox)))

area_type = error(
    "area that is no number from 0 up",
    "stops with an error in the evaluation",
    "write the number of pixels of the mask, or leave the key out",
)(annotations(lambda a: a.area is not None and not (is_number(a.area) and a.area >= 0)))

area_missing = warning(
    "area missing",
    "trains, and stops with a KeyError in the evaluation",
    "write the number of pixels of the mask, or else of the box",
)(annotations(lambda a: a.area is None))


def _no_flag(value: Any) -> bool:
    return value is not None and not (type(value) in (int, float, bool) and value in (0, 1))


iscrowd_value = error(
    "iscrowd that is neither 0 nor 1",
    "takes all but 0 for a crowd, which it does not train on",
    "write 0 for single objects, 1 for crowds",
)(annotations(lambda a: _no_flag(a.iscrowd)))

iscrowd_bool = warning(
    "iscrowd that is true or false",
    "takes false for 0 and true for 1",
    "write 0 or 1",
)(annotations(lambda a: isinstance(a.iscrowd, bool)))

iscrowd_missing = warning(
    "iscrowd missing",
    "trains with 0, and stops with a KeyError in the evaluation",
    "write 0 for single objects, 1 for crowds",
)(annotations(lambda a: a.iscrowd is None))

all_crowd = error(
    "every annotation is crowd, so that training would see none",
    "stops: no valid data found",
    "write iscrowd 0 for single objects (CVAT writes 1 with every mask that is not a polygon)",
)(lambda checked: none_right(checked, not_crowd))

ignore = error(
    "annotation to be ignored",
    'stops: "ignore" is not supported',
    "take it out, or write iscrowd 1, which neither training nor evaluation holds against the model",
)(annotations(lambda a: a.ignore))


@error(
    "no annotation at all",
    "stops: no valid data found",
    "annotate, or export again with the annotations; a file to test on gives results without a score",
)
def no_annotations(checked: CheckedFile) -> Found:
    if checked.file.annotations:
        return Found([])
    severity = ERROR if checked.training else WARNING
    return Found(where("image", checked.file.images, lambda _: True) or ["no image"], severity=severity)


def _repeated(unit: str, values: Iterable[Any]) -> list[str]:
    return [label(unit, value) for value, times in Counter(values).items() if times > 1]


duplicate_annotation_id = error(
    "annotation id used more than once",
    "stops: the ids are not unique",
    "number the annotations anew",
)(lambda checked: _repeated("annotation", (a.id for a in checked.file.annotations if is_id(a.id))))

duplicate_image_id = error(
    "image id used more than once",
    "keeps the last of the images, and gives it the annotations of all",
    "give every image an id of its own, and correct image_id",
)(lambda checked: _repeated("image", filter(is_id, (image.get("id") for image in checked.file.images))))

duplicate_category_id = error(
    "category id used more than once",
    "keeps the last of the categories",
    "give every category an id of its own, and correct category_id",
)(lambda checked: _repeated("category", filter(is_id, (c.get("id") for c in checked.file.categories))))


@warning(
    "category name used more than once",
    "trains them as two classes, and shows the AP of one",
    "join the categories, or name them differently",
)
def category_name_twice(checked: CheckedFile) -> list[str]:
    names = [category.get("name") for category in checked.file.categories]
    return _repeated("category", (name for name in names if isinstance(name, str)))


def _unknown(checked: CheckedFile, key: str, entries: Sequence[dict[str, Any]]) -> list[str]:
    known = {entry["id"] for entry in entries if is_id(entry.get("id"))}
    # Text and its number are the same here: that their types differ is another finding.
    texts = {str(number) for number in known} | {str(entry.get("id")) for entry in entries}

    def wrong(a: Annotation) -> bool:
        number = getattr(a, key)
        return number is not None and not ((is_id(number) and number in known) or str(number) in texts)

    return wrong_annotations(checked, wrong)


unknown_image = error(
    "annotation of an unknown image",
    "drops it",
    "add the image, or take the annotation out",
)(lambda checked: _unknown(checked, "image_id", checked.file.images))

unknown_category = error(
    "annotation of an unknown category",
    "stops with a KeyError when it loads the file",
    "add the category, or correct category_id",
)(lambda checked: _unknown(checked, "category_id", checked.file.categories))

annotation_id_0 = warning(
    "annotation id 0",
    "counts a found object of id 0 as not found in the evaluation, so that AP is too low",
    "number the annotations from 1",
)(annotations(lambda a: a.id == 0 and is_id(a.id)))
