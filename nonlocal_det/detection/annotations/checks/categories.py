"""Checks of the list of categories, alone and against that of another file."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import Found, error, label, warning
from nonlocal_det.detection.annotations.coco_file import CocoFile, is_id

_COCO_IDS = [category["id"] for category in COCO_CATEGORIES if category["isthing"]]


no_categories = error(
    "no category",
    "stops with a ValueError when it loads the file",
    "list the classes under categories",
)(lambda checked: [] if checked.file.categories else ["categories is empty"])


@warning(
    "category ids are not 1, 2, 3, ...",
    "numbers the classes by the order of the ids",
    "number the categories from 1",
)
def category_ids(checked: CheckedFile) -> Found:
    ids = sorted({int(c["id"]) for c in checked.file.categories if is_id(c.get("id"))})
    if ids in (list(range(1, len(ids) + 1)), _COCO_IDS):
        return Found([])
    starts = ids == list(range(len(ids)))
    wrong = [label("category", number) for place, number in enumerate(ids, start=1) if number != place]
    return Found(wrong, "category ids start at 0" if starts else None)


@warning(
    "category without any annotation",
    "learns a class that never comes, whose AP is NaN",
    "take it out of all files of the data set, if it is not meant to be a class",
)
def unused_category(checked: CheckedFile) -> Found:
    if not checked.file.annotations:
        return Found([])
    used = {a.category_id for a in checked.file.annotations if is_id(a.category_id)}
    parents = [category.get("supercategory") for category in checked.file.categories]
    unused = [c for c in checked.file.categories if is_id(c.get("id")) and c["id"] not in used]
    parent = any(category.get("name") in parents for category in unused)
    what = "category without any annotation (a super-category of others)" if parent else None
    return Found(list(map(_named, unused)), what)


def _named(category: dict[str, Any]) -> str:
    return f"{label('category', category.get('id'))} {short(category.get('name'))}"


@error(
    "every category is one keypoint",
    "takes every kind of keypoint for a class of objects",
    "make one category of the object, with the list of keypoints; in CVAT, draw skeletons",
)
def one_keypoint_categories(checked: CheckedFile) -> list[str]:
    lists = [category.get("keypoints") for category in checked.file.categories]
    if len(lists) < 2 or not all(isinstance(names, list) and len(names) <= 1 for names in lists):
        return []
    # Tools write empty lists for classes of boxes, too: then there are annotations without keypoints.
    if not all(a.keypoints is not None and a.keypoints.length == 3 for a in checked.file.annotations):
        return []
    return list(map(_named, checked.file.categories))


@error(
    "classes differ from those of the other file",
    "numbers them by their order in each file, so that it scores one class against another",
    "give both files the same categories in the same order",
)
def classes_differ(checked: CheckedFile) -> list[str]:
    if checked.other is None:
        return []
    ours, theirs = _class_names(checked.file), _class_names(checked.other)
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


@error(
    "keypoints differ from those of the other file",
    "numbers them by their order in each file, so that it scores one keypoint against another",
    "give both files the same keypoints in the same order",
)
def keypoints_differ(checked: CheckedFile) -> list[str]:
    if checked.other is None or not checked.keypoints:
        return []
    ours, theirs = _keypoint_names(checked.file), _keypoint_names(checked.other)
    return [f"{short(ours)} here, {short(theirs)} there"] if ours != theirs else []


def _keypoint_names(file: CocoFile) -> list[list[Any]]:
    lists = [category.get("keypoints") for category in file.categories]
    return [names for names in lists if isinstance(names, list) and names]
