"""Checks of annotations' keypoints."""

from __future__ import annotations

from collections import Counter

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    Found,
    annotations,
    error,
    needed_for_training,
    warning,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import Annotation, is_id


def _no_keypoints(checked: CheckedFile) -> Found:
    if not checked.keypoints or any(a.keypoints and a.keypoints.labelled for a in checked.file.annotations):
        return Found([])
    return needed_for_training(checked)


def _keypoint_length(checked: CheckedFile) -> Found:
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

    found = wrong_annotations(checked, wrong)
    first = next(filter(wrong, checked.file.annotations), None)
    if first is None or first.keypoints is None or first.keypoints.length < 0:
        return Found(found)
    return Found(found, f"keypoints of {first.keypoints.length} numbers instead of {right(first)}")


def _keypoints_missing(checked: CheckedFile) -> list[str]:
    if not checked.keypoints:
        return []
    missing = wrong_annotations(checked, lambda a: a.keypoints is None)
    return missing if len(missing) < len(checked.file.annotations) else []


CHECKS = {
    "no_keypoints": error(
        "keypoints are wanted, but no annotation has a labelled one",
        "stops: it leaves out images without keypoints, and none is left",
        "take a file with keypoints, or write MODEL.KEYPOINT_ON False",
        _no_keypoints,
    ),
    "keypoint_length": error(
        "keypoints that are not 3 finite numbers x, y, v for each keypoint",
        "stops with an error when it comes to the image",
        "write x, y, v of every keypoint of the category, with v 0 where it is not labelled",
        _keypoint_length,
    ),
    "keypoints_missing": warning(
        "no keypoints where other annotations have some",
        "stops with an error when it comes to the image",
        "write v 0 for every keypoint that is not labelled",
        _keypoints_missing,
    ),
    "num_keypoints_missing": warning(
        "num_keypoints missing",
        "trains, and stops with a KeyError in the evaluation",
        "write the number of keypoints with v > 0",
        annotations(lambda a: a.keypoints is not None and a.num_keypoints is None),
    ),
}
