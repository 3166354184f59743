"""Mending what is safe to mend in a COCO document; kinds are named as in the tables of checks."""

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
Entry = dict[str, Any]

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


def _annotations(document: Document) -> list[Entry]:
    return document.get("annotations", [])


def _each(key: str, value: Callable[[Entry, tuple[Any, Any] | None], Any]) -> Callable[[Document], int]:
    """Return a mender that sets a key of each annotation for which ``value`` has one.

    ``value`` gets the annotation, and width and height of its image if they are known.
    """

    def mend_each(document: Document) -> int:
        sizes = {_key(x.get("id")): (x["width"], x["height"]) for x in document["images"] if has_size(x)}
        mended = 0
        for annotation in _annotations(document):
            new = value(annotation, sizes.get(_key(annotation.get("image_id"))))
            if new is not None:
                annotation[key] = new
                mended += 1
        return mended

    return mend_each


def _key(value: Any) -> Any:
    """Return an id that can be looked up."""
    return value if is_id(value) else repr(value)


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


def _compressed(annotation: Entry, _: Any) -> Entry | None:
    rle = annotation.get("segmentation")
    if describe_mask(rle).kind != "counts":
        return None
    compressed = mask_util.frPyObjects(rle, *rle["size"])
    return {"size": rle["size"], "counts": compressed["counts"].decode("ascii")}


def _area(annotation: Entry, size: tuple[Any, Any] | None) -> float | None:
    if annotation.get("area") is not None:
        return None
    area = _mask_area(annotation.get("segmentation"), size)
    if area is None and is_box(annotation.get("bbox")):
        area = float(annotation["bbox"][2] * annotation["bbox"][3])
    return area


def _mask_area(segmentation: Any, size: tuple[Any, Any] | None) -> float | None:
    """Count the pixels of a mask; None without one."""
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


def _clipped(annotation: Entry, size: tuple[Any, Any] | None) -> list[Any] | None:
    box = annotation.get("bbox")
    if size is None or not is_box(box):
        return None
    (x, y, width, height), (right, bottom) = box, size
    over = max(-x, -y, x + width - right, y + height - bottom)
    left, top = max(x, 0), max(y, 0)
    clipped = [left, top, min(x + width, right) - left, min(y + height, bottom) - top]
    return clipped if over > BOX_TOLERANCE and clipped[2] > 0 and clipped[3] > 0 else None


def _labelled(annotation: Entry, _: Any) -> int | None:
    keypoints = annotation.get("keypoints")
    if keypoints and annotation.get("num_keypoints") is None and finite_numbers(keypoints):
        return sum(v > 0 for v in keypoints[2::3])
    return None


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


_MENDERS: dict[str, Callable[[Document], int]] = {
    "float_id": _float_ids,
    "iscrowd_bool": _each(
        "iscrowd", lambda a, _: int(a["iscrowd"]) if type(a.get("iscrowd")) is bool else None
    ),
    "iscrowd_missing": _each("iscrowd", lambda a, _: 0 if a.get("iscrowd") is None else None),
    "area_missing": _each("area", _area),
    "uncompressed_rle": _each("segmentation", _compressed),
    "box_outside": _each("bbox", _clipped),
    "num_keypoints_missing": _each("num_keypoints", _labelled),
    "keypoints_missing": _keypoints_missing,
    "annotation_id_0": _annotation_id_0,
    "category_ids": _category_ids,
}
#: Every kind that can be mended, in the order in which it is done.
MENDABLE = tuple(_MENDERS)
#: What an evaluation needs. Boxes and category ids stay: scores and results are those of the user's file.
FOR_EVALUATION = tuple(
    kind for kind in MENDABLE if kind not in ("uncompressed_rle", "box_outside", "category_ids")
)
