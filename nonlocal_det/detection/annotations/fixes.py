"""Mending what is safe to mend in a COCO document; kinds are named as in ``checks.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import pycocotools.mask as mask_util

from nonlocal_det.detection.annotations.coco_file import (
    describe_mask,
    finite_numbers,
    has_size,
    is_box,
    is_id,
)

Document = dict[str, Any]

#: A box may end this many pixels outside its image before it counts: tools round.
BOX_TOLERANCE = 1.0


def mend(document: Document, kinds: Collection[str] | None = None) -> dict[str, int]:
    """Mend a document in place. What is not made as expected is left as it is.

    Args:
        document: from :func:`nonlocal_det.detection.annotations.coco_file.read_document`.
        kinds: what to mend; everything in :data:`MENDABLE` by default.

    Returns:
        How many entries were mended, for each kind that was there.
    """
    counts = {kind: _MENDERS[kind](document) for kind in MENDABLE if kinds is None or kind in kinds}
    return {kind: number for kind, number in counts.items() if number}


def _annotations(document: Document) -> list[dict[str, Any]]:
    return document.get("annotations", [])


def _float_ids(document: Document) -> int:
    mended = 0
    for section, keys in (
        ("images", ("id",)),
        ("categories", ("id",)),
        ("annotations", ("id", "image_id", "category_id")),
    ):
        for entry in document.get(section, []):
            for key in keys:
                if isinstance(entry.get(key), float) and entry[key].is_integer():
                    entry[key] = int(entry[key])
                    mended += 1
    return mended


def _iscrowd_bool(document: Document) -> int:
    wrong = [a for a in _annotations(document) if isinstance(a.get("iscrowd"), bool)]
    for annotation in wrong:
        annotation["iscrowd"] = int(annotation["iscrowd"])
    return len(wrong)


def _iscrowd_missing(document: Document) -> int:
    wrong = [a for a in _annotations(document) if a.get("iscrowd") is None]
    for annotation in wrong:
        annotation["iscrowd"] = 0
    return len(wrong)


def _uncompressed_rle(document: Document) -> int:
    wrong = [a for a in _annotations(document) if describe_mask(a.get("segmentation")).kind == "counts"]
    for annotation in wrong:
        size = annotation["segmentation"]["size"]
        rle = mask_util.frPyObjects(annotation["segmentation"], *size)
        annotation["segmentation"] = {"size": size, "counts": rle["counts"].decode("ascii")}
    return len(wrong)


def _area_missing(document: Document) -> int:
    sizes = _sizes(document)
    mended = 0
    for annotation in _annotations(document):
        if annotation.get("area") is None:
            area = _mask_area(annotation, sizes.get(_key(annotation.get("image_id"))))
            if area is None and is_box(annotation.get("bbox")):
                area = float(annotation["bbox"][2] * annotation["bbox"][3])
            if area is not None:
                annotation["area"] = area
                mended += 1
    return mended


def _mask_area(annotation: dict[str, Any], size: tuple[Any, Any] | None) -> float | None:
    """Count the pixels of a mask; None without one."""
    segmentation = annotation.get("segmentation")
    mask = describe_mask(segmentation)
    if not mask.usable:
        return None
    if mask.kind == "rle":
        return float(mask_util.area(segmentation))
    if mask.kind == "counts":
        return float(mask_util.area(mask_util.frPyObjects(segmentation, *segmentation["size"])))
    if size is None or not all(type(side) is int for side in size):
        return None
    polygons = [polygon for polygon in segmentation if len(polygon) >= 6 and len(polygon) % 2 == 0]
    return float(mask_util.area(mask_util.merge(mask_util.frPyObjects(polygons, *size[::-1]))))


def _box_outside(document: Document) -> int:
    sizes = _sizes(document)
    mended = 0
    for annotation in _annotations(document):
        box, size = annotation.get("bbox"), sizes.get(_key(annotation.get("image_id")))
        if size is None or not is_box(box):
            continue
        (x, y, width, height), (right, bottom) = box, size
        over = max(-x, -y, x + width - right, y + height - bottom)
        left, top = max(x, 0), max(y, 0)
        clipped = [left, top, min(x + width, right) - left, min(y + height, bottom) - top]
        if over > BOX_TOLERANCE and clipped[2] > 0 and clipped[3] > 0:
            annotation["bbox"] = clipped
            mended += 1
    return mended


def _num_keypoints_missing(document: Document) -> int:
    mended = 0
    for annotation in _annotations(document):
        keypoints = annotation.get("keypoints")
        if keypoints and annotation.get("num_keypoints") is None and finite_numbers(keypoints):
            annotation["num_keypoints"] = sum(v > 0 for v in keypoints[2::3])
            mended += 1
    return mended


def _keypoints_missing(document: Document) -> int:
    lists = [a.get("keypoints") for a in _annotations(document)]
    lengths = {len(keypoints) for keypoints in lists if isinstance(keypoints, list) and keypoints}
    if len(lengths) != 1:
        return 0
    (length,) = lengths
    wrong = [a for a in _annotations(document) if not a.get("keypoints")]
    for annotation in wrong:
        annotation.update(keypoints=[0] * length, num_keypoints=0)
    return len(wrong)


def _annotation_id_0(document: Document) -> int:
    ids = {a.get("id") for a in _annotations(document) if type(a.get("id")) is int}
    fresh = (number for number in count(1) if number not in ids)
    wrong = [a for a in _annotations(document) if a.get("id") == 0 and type(a["id"]) is int]
    for annotation in wrong:
        annotation["id"] = next(fresh)
    return len(wrong)


def _category_ids(document: Document) -> int:
    """Number the categories 1, 2, ... in the order of their ids, which is that of Detectron2's classes."""
    ids = [category.get("id") for category in document["categories"]]
    if not all(type(number) is int for number in ids) or len(set(ids)) < len(ids):
        return 0
    new = {old: number for number, old in enumerate(sorted(ids), start=1)}
    wrong = sum(old != number for old, number in new.items())
    if wrong:
        for category in document["categories"]:
            category["id"] = new[category["id"]]
        for annotation in _annotations(document):
            number = annotation.get("category_id")
            if type(number) is int and number in new:
                annotation["category_id"] = new[number]
    return wrong


def _sizes(document: Document) -> dict[Any, tuple[float, float]]:
    """Return width and height of the images that have them, by id."""
    return {
        _key(image.get("id")): (image["width"], image["height"])
        for image in document["images"]
        if has_size(image)
    }


def _key(value: Any) -> Any:
    """Return an id that can be looked up."""
    return value if is_id(value) else repr(value)


_MENDERS: dict[str, Callable[[Document], int]] = {
    "float_id": _float_ids,
    "iscrowd_bool": _iscrowd_bool,
    "iscrowd_missing": _iscrowd_missing,
    "area_missing": _area_missing,
    "uncompressed_rle": _uncompressed_rle,
    "box_outside": _box_outside,
    "num_keypoints_missing": _num_keypoints_missing,
    "keypoints_missing": _keypoints_missing,
    "annotation_id_0": _annotation_id_0,
    "category_ids": _category_ids,
}
#: Every kind that can be mended, in the order in which it is done.
MENDABLE = tuple(_MENDERS)
#: What an evaluation needs. Boxes and category ids stay: scores and results are those of the user's file.
FOR_EVALUATION = (
    "float_id",
    "iscrowd_bool",
    "iscrowd_missing",
    "area_missing",
    "num_keypoints_missing",
    "keypoints_missing",
    "annotation_id_0",
)
