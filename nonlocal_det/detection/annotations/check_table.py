"""The table of checks: for each kind of fault in a COCO file, how it is found and the words for it.

A check is a function that names the entries at fault. A decorator puts it into the table, with its kind and
severity, the fault, what Detectron2 does with it, and the fix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES

from nonlocal_det.detection.annotations.checked_file import Subject
from nonlocal_det.detection.annotations.coco_file import (
    Annotation,
    CocoFile,
    has_size,
    is_box,
    is_id,
    is_number,
)
from nonlocal_det.detection.annotations.fixes import BOX_TOLERANCE
from nonlocal_det.detection.annotations.image_files import Picture, missing_pictures

ERROR, WARNING = "error", "warning"

_COCO_IDS = [category["id"] for category in COCO_CATEGORIES if category["isthing"]]


class Found(NamedTuple):
    """The entries at fault, where the words of the table are not enough."""

    entries: Sequence[str]
    what: str | None = None
    severity: str | None = None
    fix: str | None = None


Finder = Callable[[Subject], "Sequence[str] | Found"]


class Check(NamedTuple):
    """One entry of the table; the texts are those of ``checks.Finding``."""

    kind: str
    severity: str
    what: str
    detectron2: str
    fix: str
    find: Finder


CHECKS: list[Check] = []


def _check(kind: str, severity: str, what: str, *, detectron2: str, fix: str) -> Callable[[Finder], Finder]:
    """Put a function that names the entries at fault into the table."""

    def add(find: Finder) -> Finder:
        CHECKS.append(Check(kind, severity, what, detectron2, fix, find))
        return find

    return add


def _label(unit: str, number: Any) -> str:
    return f"{unit} {short(number)}"


def _where(
    unit: str, entries: Iterable[dict[str, Any]] | Iterable[Annotation], wrong: Callable[[Any], bool]
) -> list[str]:
    """Name the entries at fault, by their place in the file where they have no id."""
    found = []
    for place, entry in enumerate(entries):
        if wrong(entry):
            number = entry.id if isinstance(entry, Annotation) else entry.get("id")
            found.append(f"{unit} no. {place}" if number is None else _label(unit, number))
    return found


def _annotations(subject: Subject, wrong: Callable[[Annotation], bool]) -> list[str]:
    return _where("annotation", subject.annotations, wrong)


def _repeated(unit: str, numbers: Iterable[Any]) -> list[str]:
    counts = Counter(number for number in numbers if is_id(number))
    if len(counts) == sum(counts.values()):
        return []
    return [_label(unit, number) for number, times in counts.items() if times > 1]


def _needed_for_training(subject: Subject) -> Found:
    """Name all annotations: an error in a file to train on, a missing score in one to test on."""
    return Found(_annotations(subject, lambda _: True), severity=ERROR if subject.training else WARNING)


def _not_crowd(annotation: Annotation) -> bool:
    return not annotation.iscrowd


# --- Keys and types -----------------------------------------------------------------------------------------


@_check(
    "missing_key",
    ERROR,
    "missing key",
    detectron2="stops with a KeyError when it loads the file, or comes to the image",
    fix="an image needs id, file_name, width, height; an annotation id, image_id, category_id, bbox; a "
    "category id, name",
)
def _missing_key(subject: Subject) -> Found:
    keys: set[str] = set()

    def lacks(needed: Sequence[str], values: Sequence[Any]) -> bool:
        absent = [key for key, value in zip(needed, values, strict=True) if value is None]
        keys.update(absent)
        return bool(absent)

    of_annotation = ("id", "image_id", "category_id", "bbox")
    found = _annotations(
        subject,  # The first test is there for speed.
        lambda a: None in a[:4] and lacks(of_annotation, (a.id, a.image_id, a.category_id, a.bbox)),
    )
    for unit, entries, needed in (
        ("image", subject.images, ("id", "file_name", "width", "height")),
        ("category", subject.categories, ("id", "name")),
    ):
        found += _where(unit, entries, lambda e, needed=needed: lacks(needed, [e.get(key) for key in needed]))
    return Found(found, f"missing key{'s' if len(keys) > 1 else ''} {', '.join(sorted(keys))}")


@_check(
    "id_type",
    ERROR,
    "id that is no whole number from 0 up",
    detectron2="takes text and the same number for different ids, and drops what belongs to no image",
    fix="write every id, image_id and category_id as a number",
)
def _id_type(subject: Subject) -> Found:
    def wrong(*values: Any) -> bool:
        return not all(value is None or is_id(value) for value in values)

    found = _where("image", subject.images, lambda image: wrong(image.get("id")))
    found += _where("category", subject.categories, lambda category: wrong(category.get("id")))
    found += _annotations(subject, lambda a: wrong(a.id, a.image_id, a.category_id))
    lost = _lost_by_type(subject) if found else 0
    return Found(
        found,
        f"id that is no whole number from 0 up, so that {lost} of {len(subject.annotations)} annotations "
        f"{'belongs' if lost == 1 else 'belong'} to no image"
        if lost
        else None,
    )


def _lost_by_type(subject: Subject) -> int:
    """Count the annotations that would have an image if text and its number were the same."""
    exact = {_typed(image.get("id")) for image in subject.images}
    loose = {str(image.get("id")) for image in subject.images}
    return sum(_typed(a.image_id) not in exact and str(a.image_id) in loose for a in subject.annotations)


def _typed(value: Any) -> tuple[bool, str]:
    return isinstance(value, str), str(value)


@_check(
    "float_id",
    WARNING,
    "id with a decimal point",
    detectron2="takes 3.0 for 3",
    fix="write whole numbers",
)
def _float_id(subject: Subject) -> list[str]:
    def wrong(*values: Any) -> bool:
        return any(type(value) is float and is_id(value) for value in values)

    found = _where("image", subject.images, lambda image: wrong(image.get("id")))
    found += _where("category", subject.categories, lambda category: wrong(category.get("id")))
    return found + _annotations(subject, lambda a: wrong(a.id, a.image_id, a.category_id))


@_check(
    "image_size_type",
    ERROR,
    "image whose width or height is no positive number",
    detectron2="stops with a SizeMismatchError when it comes to the image",
    fix="write width and height in pixels",
)
def _image_size_type(subject: Subject) -> list[str]:
    def wrong(image: dict[str, Any]) -> bool:
        return image.get("width") is not None and image.get("height") is not None and not has_size(image)

    return _where("image", subject.images, wrong)


@_check(
    "file_name_type",
    ERROR,
    "image whose file_name is no text",
    detectron2="stops with a TypeError when it loads the file",
    fix="write the path from the image folder",
)
def _file_name_type(subject: Subject) -> list[str]:
    return _where(
        "image", subject.images, lambda image: not isinstance(image.get("file_name"), (str, type(None)))
    )


@_check(
    "category_name_type",
    ERROR,
    "category whose name is no text",
    detectron2="trains, and stops with a TypeError in the evaluation",
    fix="write the name in quotes",
)
def _category_name_type(subject: Subject) -> list[str]:
    return _where("category", subject.categories, lambda c: not isinstance(c.get("name"), (str, type(None))))


@_check(
    "box_type",
    ERROR,
    "bbox that is no list of 4 finite numbers",
    detectron2="stops with an error when it comes to the image, or drops the object",
    fix="write [x, y, width, height] in pixels",
)
def _box_type(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.bbox is not None and not is_box(a.bbox))


@_check(
    "area_type",
    ERROR,
    "area that is no number from 0 up",
    detectron2="stops with an error in the evaluation",
    fix="write the number of pixels of the mask, or leave the key out",
)
def _area_type(subject: Subject) -> list[str]:
    def wrong(area: Any) -> bool:
        return area is not None and not (is_number(area) and area >= 0)

    return _annotations(subject, lambda a: wrong(a.area))


@_check(
    "area_missing",
    WARNING,
    "area missing",
    detectron2="trains, and stops with a KeyError in the evaluation",
    fix="write the number of pixels of the mask, or else of the box",
)
def _area_missing(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.area is None)


# --- Crowd --------------------------------------------------------------------------------------------------


@_check(
    "iscrowd_value",
    ERROR,
    "iscrowd that is neither 0 nor 1",
    detectron2="takes all but 0 for a crowd, which it does not train on",
    fix="write 0 for single objects, 1 for crowds",
)
def _iscrowd_value(subject: Subject) -> list[str]:
    def wrong(value: Any) -> bool:
        return value is not None and not (type(value) in (int, float, bool) and value in (0, 1))

    return _annotations(subject, lambda a: wrong(a.iscrowd))


@_check(
    "iscrowd_bool",
    WARNING,
    "iscrowd that is true or false",
    detectron2="takes false for 0 and true for 1",
    fix="write 0 or 1",
)
def _iscrowd_bool(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: isinstance(a.iscrowd, bool))


@_check(
    "iscrowd_missing",
    WARNING,
    "iscrowd missing",
    detectron2="trains with 0, and stops with a KeyError in the evaluation",
    fix="write 0 for single objects, 1 for crowds",
)
def _iscrowd_missing(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.iscrowd is None)


@_check(
    "all_crowd",
    ERROR,
    "every annotation is crowd, so that training would see none",
    detectron2="stops: no valid data found",
    fix="write iscrowd 0 for single objects (CVAT writes 1 with every mask that is not a polygon)",
)
def _all_crowd(subject: Subject) -> Found:
    if any(map(_not_crowd, subject.annotations)):
        return Found([])
    return _needed_for_training(subject)


@_check(
    "ignore",
    ERROR,
    "annotation to be ignored",
    detectron2='stops: "ignore" is not supported',
    fix="take it out, or write iscrowd 1, which neither training nor evaluation holds against the model",
)
def _ignore(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: bool(a.ignore))


# --- What belongs to what -----------------------------------------------------------------------------------


@_check(
    "no_annotations",
    ERROR,
    "no annotation at all",
    detectron2="stops: no valid data found",
    fix="annotate, or export again with the annotations; a file to test on gives results without a score",
)
def _no_annotations(subject: Subject) -> Found:
    if subject.annotations:
        return Found([])
    severity = ERROR if subject.training else WARNING
    return Found(_where("image", subject.images, lambda _: True) or ["no image"], severity=severity)


@_check(
    "duplicate_annotation_id",
    ERROR,
    "annotation id used more than once",
    detectron2="stops: the ids are not unique",
    fix="number the annotations anew",
)
def _duplicate_annotation_id(subject: Subject) -> list[str]:
    return _repeated("annotation", (a.id for a in subject.annotations))


@_check(
    "duplicate_image_id",
    ERROR,
    "image id used more than once",
    detectron2="keeps the last of the images, and gives it the annotations of all",
    fix="give every image an id of its own, and correct image_id",
)
def _duplicate_image_id(subject: Subject) -> list[str]:
    return _repeated("image", (image.get("id") for image in subject.images))


@_check(
    "duplicate_category_id",
    ERROR,
    "category id used more than once",
    detectron2="keeps the last of the categories",
    fix="give every category an id of its own, and correct category_id",
)
def _duplicate_category_id(subject: Subject) -> list[str]:
    return _repeated("category", (category.get("id") for category in subject.categories))


@_check(
    "category_name_twice",
    WARNING,
    "category name used more than once",
    detectron2="trains them as two classes, and shows the AP of one",
    fix="join the categories, or name them differently",
)
def _category_name_twice(subject: Subject) -> list[str]:
    names = Counter(c["name"] for c in subject.categories if isinstance(c.get("name"), str))
    return [_label("category", name) for name, times in names.items() if times > 1]


@_check(
    "unknown_image",
    ERROR,
    "annotation of an unknown image",
    detectron2="drops it",
    fix="add the image, or take the annotation out",
)
def _unknown_image(subject: Subject) -> list[str]:
    known = _known(subject.images)
    return _annotations(subject, lambda a: a.image_id is not None and not known(a.image_id))


@_check(
    "unknown_category",
    ERROR,
    "annotation of an unknown category",
    detectron2="stops with a KeyError when it loads the file",
    fix="add the category, or correct category_id",
)
def _unknown_category(subject: Subject) -> list[str]:
    known = _known(subject.categories)
    return _annotations(subject, lambda a: a.category_id is not None and not known(a.category_id))


def _known(entries: Sequence[dict[str, Any]]) -> Callable[[Any], bool]:
    """Return a test for ids; text and its number are the same here, as their types are another finding."""
    numbers = {entry["id"] for entry in entries if is_id(entry.get("id"))}
    texts = {str(number) for number in numbers} | {str(entry.get("id")) for entry in entries}
    return lambda number: (is_id(number) and number in numbers) or str(number) in texts


@_check(
    "annotation_id_0",
    WARNING,
    "annotation id 0",
    detectron2="counts a found object of id 0 as not found in the evaluation, so that AP is too low",
    fix="number the annotations from 1",
)
def _annotation_id_0(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.id == 0 and is_id(a.id))


# --- Categories ---------------------------------------------------------------------------------------------


@_check(
    "no_categories",
    ERROR,
    "no category",
    detectron2="stops with a ValueError when it loads the file",
    fix="list the classes under categories",
)
def _no_categories(subject: Subject) -> list[str]:
    return [] if subject.categories else ["categories is empty"]


@_check(
    "category_ids",
    WARNING,
    "category ids are not 1, 2, 3, ...",
    detectron2="numbers the classes by the order of the ids",
    fix="number the categories from 1",
)
def _category_ids(subject: Subject) -> Found:
    ids = sorted({int(c["id"]) for c in subject.categories if is_id(c.get("id"))})
    if ids in (list(range(1, len(ids) + 1)), _COCO_IDS):
        return Found([])
    starts = ids == list(range(len(ids)))
    wrong = [_label("category", number) for place, number in enumerate(ids, start=1) if number != place]
    return Found(wrong, "category ids start at 0" if starts else None)


@_check(
    "unused_category",
    WARNING,
    "category without any annotation",
    detectron2="learns a class that never comes, whose AP is NaN",
    fix="take it out of all files of the data set, if it is not meant to be a class",
)
def _unused_category(subject: Subject) -> Found:
    if not subject.annotations:
        return Found([])
    used = {a.category_id for a in subject.annotations if is_id(a.category_id)}
    parents = [category.get("supercategory") for category in subject.categories]
    unused = [c for c in subject.categories if is_id(c.get("id")) and c["id"] not in used]
    parent = any(category.get("name") in parents for category in unused)
    what = "category without any annotation (a super-category of others)" if parent else None
    return Found([f"{_label('category', c['id'])} {short(c.get('name'))}" for c in unused], what)


@_check(
    "one_keypoint_categories",
    ERROR,
    "every category is one keypoint",
    detectron2="takes every kind of keypoint for a class of objects",
    fix="make one category of the object, with the list of keypoints; in CVAT, draw skeletons",
)
def _one_keypoint_categories(subject: Subject) -> list[str]:
    lists = [category.get("keypoints") for category in subject.categories]
    if len(lists) < 2 or not all(isinstance(names, list) and len(names) <= 1 for names in lists):
        return []
    # Tools write empty lists for classes of boxes, too: then there are annotations without keypoints.
    if not all(a.keypoints is not None and a.keypoints.length == 3 for a in subject.annotations):
        return []
    return [f"{_label('category', c.get('id'))} {short(c.get('name'))}" for c in subject.categories]


@_check(
    "classes_differ",
    ERROR,
    "classes differ from those of the other file",
    detectron2="numbers them by their order in each file, so that it scores one class against another",
    fix="give both files the same categories in the same order",
)
def _classes_differ(subject: Subject) -> list[str]:
    if subject.other is None:
        return []
    ours, theirs = _class_names(subject.file), _class_names(subject.other)
    if ours == theirs:
        return []
    changes = [f"only here: {short(name)}" for name in ours if name not in theirs]
    changes += [f"only there: {short(name)}" for name in theirs if name not in ours]
    return changes or [
        f"{short(a)} here is {short(b)} there" for a, b in zip(ours, theirs, strict=False) if a != b
    ]


def _class_names(file: CocoFile) -> list[Any]:
    usable = [category for category in file.categories if is_id(category.get("id"))]
    return [category.get("name") for category in sorted(usable, key=lambda category: category["id"])]


@_check(
    "keypoints_differ",
    ERROR,
    "keypoints differ from those of the other file",
    detectron2="numbers them by their order in each file, so that it scores one keypoint against another",
    fix="give both files the same keypoints in the same order",
)
def _keypoints_differ(subject: Subject) -> list[str]:
    if subject.other is None or not subject.keypoints:
        return []
    ours, theirs = _keypoint_names(subject.file), _keypoint_names(subject.other)
    return [f"{short(ours)} here, {short(theirs)} there"] if ours != theirs else []


def _keypoint_names(file: CocoFile) -> list[list[Any]]:
    lists = [category.get("keypoints") for category in file.categories]
    return [names for names in lists if isinstance(names, list) and names]


# --- Boxes --------------------------------------------------------------------------------------------------


@_check(
    "box_size",
    ERROR,
    "box of zero or negative size",
    detectron2="drops the object whenever it comes to the image",
    fix="draw the box again, or take the annotation out",
)
def _box_size(subject: Subject) -> list[str]:
    annotations, boxes, _ = subject.boxes
    return _at("annotation", annotations, (boxes[:, 2:] <= 0).any(axis=1))


@_check(
    "box_off_image",
    ERROR,
    "box that lies wholly outside its image",
    detectron2="drops the object whenever it comes to the image",
    fix="correct bbox, which is [x, y, width, height] in pixels of the image as the file gives its size",
)
def _box_off_image(subject: Subject) -> list[str]:
    annotations, boxes, limits = subject.boxes
    return _at("annotation", annotations, _off_image(boxes, limits) & (boxes[:, 2:] > 0).all(axis=1))


@_check(
    "box_outside",
    WARNING,
    "box that reaches outside its image",
    detectron2="clips it for training, and evaluates with it as it is",
    fix="clip it to the image",
)
def _box_outside(subject: Subject) -> Found:
    annotations, boxes, limits = subject.boxes
    over = np.maximum(-boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - limits).max(axis=1, initial=-np.inf)
    wrong = (over > BOX_TOLERANCE) & (boxes[:, 2:] > 0).all(axis=1) & ~_off_image(boxes, limits)
    corners = wrong.sum() > len(boxes) / 2  # x1, y1, x2, y2 would look like this
    fix = "if these are corners [x1, y1, x2, y2], write [x, y, width, height]; else clip them to the image"
    return Found(_at("annotation", annotations, wrong), fix=fix if corners else None)


def _off_image(boxes: np.ndarray, limits: np.ndarray) -> np.ndarray:
    return ((boxes[:, :2] >= limits) | (boxes[:, :2] + boxes[:, 2:] <= 0)).any(axis=1)


@_check(
    "negative_coordinates",
    WARNING,
    "negative coordinates of box, mask or keypoint",
    detectron2="clips boxes and masks, and takes such a keypoint for not labelled",
    fix="correct them, or cut what is outside the image",
)
def _negative_coordinates(subject: Subject) -> list[str]:
    def wrong(a: Annotation) -> bool:
        low = min(a.mask.low, 0 if a.keypoints is None else a.keypoints.low)
        return low < -BOX_TOLERANCE or (is_box(a.bbox) and min(a.bbox[:2]) < -BOX_TOLERANCE)

    return _annotations(subject, wrong)


def _at(unit: str, annotations: Sequence[Annotation], wrong: np.ndarray) -> list[str]:
    return [_label(unit, annotations[i].id) for i in np.flatnonzero(wrong)]


# --- Masks --------------------------------------------------------------------------------------------------


@_check(
    "no_mask",
    ERROR,
    "masks are wanted, but no annotation has a usable one",
    detectron2="stops in the first step: it has no masks to learn from",
    fix="take a file with segmentation, or write MODEL.MASK_ON False",
)
def _no_mask(subject: Subject) -> Found:
    if not subject.masks or any(a.mask.usable for a in subject.annotations):
        return Found([])
    return _needed_for_training(subject)


@_check(
    "broken_mask",
    ERROR,
    "segmentation that is no mask",
    detectron2="stops with an error when it loads the file or comes to the image",
    fix="write polygons [[x, y, x, y, ...], ...] or an RLE {size: [height, width], counts}",
)
def _broken_mask(subject: Subject) -> Found:
    why = next((a.mask.why for a in subject.annotations if a.mask.kind == "broken"), "")
    found = _annotations(subject, lambda a: a.mask.kind == "broken")
    return Found(found, f"segmentation that is no mask ({why})")


@_check(
    "rle_size",
    ERROR,
    "RLE of another size than the image",
    detectron2="stops with an AssertionError when it comes to the image",
    fix="write the mask at the size [height, width] of the image",
)
def _rle_size(subject: Subject) -> list[str]:
    def wrong(a: Annotation) -> bool:
        if a.mask.size is None or not is_id(a.image_id):
            return False
        size = subject.sizes.get(a.image_id)
        return size is not None and tuple(a.mask.size) != size[::-1]

    return _annotations(subject, wrong)


@_check(
    "short_polygon",
    WARNING,
    "polygon of fewer than 3 points, or with half a point",
    detectron2="leaves the polygon out, and the object too if it has no other",
    fix="draw it again, or take it out",
)
def _short_polygon(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.mask.short > 0)


@_check(
    "empty_segmentation",
    WARNING,
    "empty segmentation",
    detectron2="with masks on stops with a KeyError when it comes to the image; here the object is left out",
    fix="draw the mask",
)
def _empty_segmentation(subject: Subject) -> Found:
    found = _annotations(subject, lambda a: a.mask.kind == "empty")
    # Where no mask is left, this is why.
    lost = subject.masks and subject.training and not any(a.mask.usable for a in subject.annotations)
    return Found(found, severity=ERROR if lost else None)


@_check(
    "mask_missing",
    WARNING,
    "no segmentation where other annotations have one",
    detectron2="with masks on stops with a KeyError when it comes to the image; here the object is left out",
    fix="draw the mask",
)
def _mask_missing(subject: Subject) -> list[str]:
    missing = _annotations(subject, lambda a: a.mask.kind == "absent")
    return missing if len(missing) < len(subject.annotations) else []


@_check(
    "uncompressed_rle",
    WARNING,
    "mask as an uncompressed RLE",
    detectron2="compresses it when it loads the file",
    fix="write compressed RLE or polygons",
)
def _uncompressed_rle(subject: Subject) -> list[str]:
    # COCO's own files have crowds as uncompressed RLE, among polygons.
    crowds = not any(map(_not_crowd, subject.annotations))
    return _annotations(subject, lambda a: a.mask.kind == "counts" and (crowds or _not_crowd(a)))


# --- Keypoints ----------------------------------------------------------------------------------------------


@_check(
    "no_keypoints",
    ERROR,
    "keypoints are wanted, but no annotation has a labelled one",
    detectron2="stops: it leaves out images without keypoints, and none is left",
    fix="take a file with keypoints, or write MODEL.KEYPOINT_ON False",
)
def _no_keypoints(subject: Subject) -> Found:
    if not subject.keypoints or any(a.keypoints and a.keypoints.labelled for a in subject.annotations):
        return Found([])
    return _needed_for_training(subject)


@_check(
    "keypoint_length",
    ERROR,
    "keypoints that are not 3 finite numbers x, y, v for each keypoint",
    detectron2="stops with an error when it comes to the image",
    fix="write x, y, v of every keypoint of the category, with v 0 where it is not labelled",
)
def _keypoint_length(subject: Subject) -> Found:
    lengths = Counter(a.keypoints.length for a in subject.annotations if a.keypoints is not None)
    if not lengths:
        return Found([])
    usual = lengths.most_common(1)[0][0]
    named = {
        c["id"]: 3 * len(c["keypoints"])
        for c in subject.categories
        if is_id(c.get("id")) and isinstance(c.get("keypoints"), list) and c["keypoints"]
    }

    def right(a: Annotation) -> int:
        return named.get(a.category_id, usual) if is_id(a.category_id) else usual

    def wrong(a: Annotation) -> bool:
        return a.keypoints is not None and (a.keypoints.length != right(a) or a.keypoints.length % 3 != 0)

    found = _annotations(subject, wrong)
    first = next((a for a in subject.annotations if wrong(a)), None)
    if first is None or first.keypoints is None or first.keypoints.length < 0:
        return Found(found)
    return Found(found, f"keypoints of {first.keypoints.length} numbers instead of {right(first)}")


@_check(
    "keypoints_missing",
    WARNING,
    "no keypoints where other annotations have some",
    detectron2="stops with an error when it comes to the image",
    fix="write v 0 for every keypoint that is not labelled",
)
def _keypoints_missing(subject: Subject) -> list[str]:
    if not subject.keypoints:
        return []
    missing = _annotations(subject, lambda a: a.keypoints is None)
    return missing if len(missing) < len(subject.annotations) else []


@_check(
    "num_keypoints_missing",
    WARNING,
    "num_keypoints missing",
    detectron2="trains, and stops with a KeyError in the evaluation",
    fix="write the number of keypoints with v > 0",
)
def _num_keypoints_missing(subject: Subject) -> list[str]:
    return _annotations(subject, lambda a: a.keypoints is not None and a.num_keypoints is None)


# --- Pictures -----------------------------------------------------------------------------------------------


@_check(
    "outside_picture",
    ERROR,
    "file_name that leads out of the image folder",
    detectron2="reads whatever file it names",
    fix="put the picture into the folder and correct file_name; or allow it by "
    "DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT True (check_dataset: --allow-outside)",
)
def _outside_picture(subject: Subject) -> list[str]:
    return [f"{_label('image', image.get('id'))} {image['file_name']}" for image in subject.outside_images]


@_check(
    "missing_picture",
    ERROR,
    "image whose picture is not there",
    detectron2="stops with a FileNotFoundError when it comes to the image",
    fix="correct file_name, which is the path from the image folder, or the folder",
)
def _missing_picture(subject: Subject) -> Found:
    if subject.folder is None:
        return Found([])
    missing = missing_pictures(subject.named_images, subject.folder)
    return _bad_pictures(
        subject,
        "image whose picture is not there",
        [f"{_label('image', image.get('id'))} {image['file_name']}" for image in missing],
        len(subject.named_images),
    )


def _bad_pictures(subject: Subject, what: str, found: Sequence[str], looked_at: int) -> Found:
    """Say what comes of pictures that are of no use, of those that were looked at."""
    if subject.max_bad_fraction is None:
        return Found(found)
    # One or two of a sample of 50 say little of the whole.
    too_many = len(found) > max(2, subject.max_bad_fraction * looked_at) or len(found) == looked_at
    return Found(
        found,
        f"{what} (training takes another in its place, up to DATALOADER.MAX_BAD_FRACTION "
        f"{subject.max_bad_fraction} of all; here {len(found)} of {looked_at})",
        severity=ERROR if too_many else WARNING,
    )


@_check(
    "unreadable_picture",
    ERROR,
    "picture that cannot be read",
    detectron2="stops with an error when it comes to the image",
    fix="replace the picture, or take the image out of the file",
)
def _unreadable_picture(subject: Subject) -> Found:
    return _bad_pictures(
        subject,
        "picture that cannot be read",
        [
            f"{_label('image', picture.image.get('id'))} {picture.image['file_name']}: {picture.problem}"
            for picture in subject.pictures
            if picture.problem is not None
        ],
        len(subject.pictures),
    )


@_check(
    "picture_size",
    ERROR,
    "picture of another size than the file says",
    detectron2="stops with a SizeMismatchError when it comes to the image",
    fix="write the size of the picture, and check that the annotations fit to it",
)
def _picture_size(subject: Subject) -> Found:
    wrong = [p for p in subject.pictures if p.size is not None and _says_otherwise(p)]
    turned = [p for p in wrong if p.turned and p.size == (p.image["height"], p.image["width"])]
    fix = "annotate the picture upright, as its EXIF orientation turns it, or take the orientation out of it"
    return Found(
        [
            f"{_label('image', p.image.get('id'))} {p.image['width']} x {p.image['height']}, is "
            f"{p.size[0]} x {p.size[1]}{' by its EXIF orientation' if p.turned else ''}"
            for p in wrong
        ],
        fix=fix if turned else None,
    )


def _says_otherwise(picture: Picture) -> bool:
    return has_size(picture.image) and picture.size != (picture.image["width"], picture.image["height"])
