"""Checks of what an annotation draws: its box, its mask and its keypoints."""

from __future__ import annotations

from collections import Counter

import numpy as np

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    ERROR,
    Found,
    annotations,
    error,
    label,
    none_right,
    not_all,
    not_crowd,
    warning,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import Annotation, is_box, is_id
from nonlocal_det.detection.annotations.fixes import BOX_TOLERANCE


def _at(checked: CheckedFile, wrong: np.ndarray) -> list[str]:
    """Name the annotations with a box that are wrong, bool [N]."""
    return [label("annotation", checked.boxes[0][i].id) for i in np.flatnonzero(wrong)]


def _has_area(checked: CheckedFile) -> np.ndarray:
    return (checked.boxes[1][:, 2:] > 0).all(axis=1)


def _off_image(checked: CheckedFile) -> np.ndarray:
    _, boxes, limits = checked.boxes
    return ((boxes[:, :2] >= limits) | (boxes[:, :2] + boxes[:, 2:] <= 0)).any(axis=1)


box_size = error(
    "box of zero or negative size",
    "drops the object whenever it comes to the image",
    "draw the box again, or take the annotation out",
)(lambda checked: _at(checked, ~_has_area(checked)))

box_off_image = error(
    "box that lies wholly outside its image",
    "drops the object whenever it comes to the image",
    "correct bbox, which is [x, y, width, height] in pixels of the image as the file gives its size",
)(lambda checked: _at(checked, _off_image(checked) & _has_area(checked)))


@warning(
    "box that reaches outside its image",
    "clips it for training, and evaluates with it as it is",
    "clip it to the image",
)
def box_outside(checked: CheckedFile) -> Found:
    _, boxes, limits = checked.boxes
    over = np.maximum(-boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - limits).max(axis=1, initial=-np.inf)
    wrong = (over > BOX_TOLERANCE) & _has_area(checked) & ~_off_image(checked)
    corners = wrong.sum() > len(boxes) / 2  # x1, y1, x2, y2 would look like this
    fix = "if these are corners [x1, y1, x2, y2], write [x, y, width, height]; else clip them to the image"
    return Found(_at(checked, wrong), fix=fix if corners else None)


def _negative(a: Annotation) -> bool:
    low = min(a.mask.low, 0 if a.keypoints is None else a.keypoints.low)
    return low < -BOX_TOLERANCE or (is_box(a.bbox) and min(a.bbox[:2]) < -BOX_TOLERANCE)


negative_coordinates = warning(
    "negative coordinates of box, mask or keypoint",
    "clips boxes and masks, and takes such a keypoint for not labelled",
    "correct them, or cut what is outside the image",
)(annotations(_negative))

no_mask = error(
    "masks are wanted, but no annotation has a usable one",
    "stops in the first step: it has no masks to learn from",
    "take a file with segmentation, or write MODEL.MASK_ON False",
)(lambda checked: none_right(checked, lambda a: a.mask.usable) if checked.masks else [])


@error(
    "segmentation that is no mask",
    "stops with an error when it loads the file or comes to the image",
    "write polygons [[x, y, x, y, ...], ...] or an RLE {size: [height, width], counts}",
)
def broken_mask(checked: CheckedFile) -> Found:
    why = next((a.mask.why for a in checked.file.annotations if a.mask.kind == "broken"), "")
    found = wrong_annotations(checked, lambda a: a.mask.kind == "broken")
    return Found(found, f"segmentation that is no mask ({why})")


@error(
    "RLE of another size than the image",
    "stops with an AssertionError when it comes to the image",
    "write the mask at the size [height, width] of the image",
)
def rle_size(checked: CheckedFile) -> list[str]:
    def wrong(a: Annotation) -> bool:
        if a.mask.size is None or not is_id(a.image_id):
            return False
        size = checked.sizes.get(a.image_id)
        return size is not None and a.mask.size != size[::-1]

    return wrong_annotations(checked, wrong)


short_polygon = warning(
    "polygon of fewer than 3 points, or with half a point",
    "leaves the polygon out, and the object too if it has no other",
    "draw it again, or take it out",
)(annotations(lambda a: a.mask.short > 0))

_WITHOUT_MASK = "with masks on stops with a KeyError when it comes to the image; here the object is left out"


@warning("empty segmentation", _WITHOUT_MASK, "draw the mask")
def empty_segmentation(checked: CheckedFile) -> Found:
    found = wrong_annotations(checked, lambda a: a.mask.kind == "empty")
    # Where no mask is left, this is why.
    lost = checked.masks and checked.training and not any(a.mask.usable for a in checked.file.annotations)
    return Found(found, severity=ERROR if lost else None)


mask_missing = warning("no segmentation where other annotations have one", _WITHOUT_MASK, "draw the mask")(
    lambda checked: not_all(checked, lambda a: a.mask.kind == "absent")
)


@warning(
    "mask as an uncompressed RLE",
    "compresses it when it loads the file",
    "write compressed RLE or polygons",
)
def uncompressed_rle(checked: CheckedFile) -> list[str]:
    # COCO's own files have crowds as uncompressed RLE, among polygons.
    crowds = not any(map(not_crowd, checked.file.annotations))
    return wrong_annotations(checked, lambda a: a.mask.kind == "counts" and (crowds or not_crowd(a)))


no_keypoints = error(
    "keypoints are wanted, but no annotation has a labelled one",
    "stops: it leaves out images without keypoints, and none is left",
    "take a file with keypoints, or write MODEL.KEYPOINT_ON False",
)(
    lambda checked: (
        none_right(checked, lambda a: a.keypoints and a.keypoints.labelled) if checked.keypoints else []
    )
)


@error(
    "keypoints that are not 3 finite numbers x, y, v for each keypoint",
    "stops with an error when it comes to the image",
    "write x, y, v of every keypoint of the category, with v 0 where it is not labelled",
)
def keypoint_length(checked: CheckedFile) -> Found:
    lengths = Counter(a.keypoints.length for a in checked.file.annotations if a.keypoints is not None)
    if not lengths:
        return Found([])
    usual = lengths.most_common(1)[0][0]
    named = {
        c["id"]: 3 * len(c["keypoints"])
        for c in checked.file.categories
        if is_id(c.get("id")) and isinstance(c.get("keypoints"), list) and c["keypoints"]
    }

    def right(a: Annotation) -> int:
        return named.get(a.category_id, usual) if is_id(a.category_id) else usual

    def wrong(a: Annotation) -> bool:
        return a.keypoints is not None and (a.keypoints.length != right(a) or a.keypoints.length % 3 != 0)

    first = next(filter(wrong, checked.file.annotations), None)
    known = first is not None and first.keypoints.length >= 0
    what = f"keypoints of {first.keypoints.length} numbers instead of {right(first)}" if known else None
    return Found(wrong_annotations(checked, wrong), what)


keypoints_missing = warning(
    "no keypoints where other annotations have some",
    "stops with an error when it comes to the image",
    "write v 0 for every keypoint that is not labelled",
)(lambda checked: not_all(checked, lambda a: a.keypoints is None) if checked.keypoints else [])

num_keypoints_missing = warning(
    "num_keypoints missing",
    "trains, and stops with a KeyError in the evaluation",
    "write the number of keypoints with v > 0",
)(annotations(lambda a: a.keypoints is not None and a.num_keypoints is None))
