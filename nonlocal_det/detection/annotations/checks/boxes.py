"""Checks of boxes: their size, and where they lie in their image."""

from __future__ import annotations

import numpy as np

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import Found, annotations, error, label, warning
from nonlocal_det.detection.annotations.coco_file import Annotation, is_box
from nonlocal_det.detection.annotations.fixes import BOX_TOLERANCE


def _box_size(checked: CheckedFile) -> list[str]:
    return _at(checked, ~_has_area(checked))


def _box_off_image(checked: CheckedFile) -> list[str]:
    return _at(checked, _off_image(checked) & _has_area(checked))


def _box_outside(checked: CheckedFile) -> Found:
    _, boxes, limits = checked.boxes
    over = np.maximum(-boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - limits).max(axis=1, initial=-np.inf)
    wrong = (over > BOX_TOLERANCE) & _has_area(checked) & ~_off_image(checked)
    corners = wrong.sum() > len(boxes) / 2  # x1, y1, x2, y2 would look like this
    fix = "if these are corners [x1, y1, x2, y2], write [x, y, width, height]; else clip them to the image"
    return Found(_at(checked, wrong), fix=fix if corners else None)


def _has_area(checked: CheckedFile) -> np.ndarray:
    return (checked.boxes[1][:, 2:] > 0).all(axis=1)


def _off_image(checked: CheckedFile) -> np.ndarray:
    _, boxes, limits = checked.boxes
    return ((boxes[:, :2] >= limits) | (boxes[:, :2] + boxes[:, 2:] <= 0)).any(axis=1)


def _at(checked: CheckedFile, wrong: np.ndarray) -> list[str]:
    """Name the annotations with a box that are wrong, bool [N]."""
    return [label("annotation", checked.boxes[0][i].id) for i in np.flatnonzero(wrong)]


def _negative(a: Annotation) -> bool:
    low = min(a.mask.low, 0 if a.keypoints is None else a.keypoints.low)
    return low < -BOX_TOLERANCE or (is_box(a.bbox) and min(a.bbox[:2]) < -BOX_TOLERANCE)


CHECKS = {
    "box_size": error(
        "box of zero or negative size",
        "drops the object whenever it comes to the image",
        "draw the box again, or take the annotation out",
        _box_size,
    ),
    "box_off_image": error(
        "box that lies wholly outside its image",
        "drops the object whenever it comes to the image",
        "correct bbox, which is [x, y, width, height] in pixels of the image as the file gives its size",
        _box_off_image,
    ),
    "box_outside": warning(
        "box that reaches outside its image",
        "clips it for training, and evaluates with it as it is",
        "clip it to the image",
        _box_outside,
    ),
    "negative_coordinates": warning(
        "negative coordinates of box, mask or keypoint",
        "clips boxes and masks, and takes such a keypoint for not labelled",
        "correct them, or cut what is outside the image",
        annotations(_negative),
    ),
}
