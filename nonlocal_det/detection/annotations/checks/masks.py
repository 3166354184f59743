"""Checks of masks: polygons and RLE."""

from __future__ import annotations

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.table import (
    ERROR,
    Found,
    annotations,
    error,
    needed_for_training,
    not_crowd,
    warning,
    wrong_annotations,
)
from nonlocal_det.detection.annotations.coco_file import Annotation, is_id


def _no_mask(checked: CheckedFile) -> Found:
    if not checked.masks or any(a.mask.usable for a in checked.file.annotations):
        return Found([])
    return needed_for_training(checked)


def _broken_mask(checked: CheckedFile) -> Found:
    why = next((a.mask.why for a in checked.file.annotations if a.mask.kind == "broken"), "")
    found = wrong_annotations(checked, lambda a: a.mask.kind == "broken")
    return Found(found, f"segmentation that is no mask ({why})")


def _rle_size(checked: CheckedFile) -> list[str]:
    def wrong(a: Annotation) -> bool:
        if a.mask.size is None or not is_id(a.image_id):
            return False
        size = checked.sizes.get(a.image_id)
        return size is not None and tuple(a.mask.size) != size[::-1]

    return wrong_annotations(checked, wrong)


def _empty_segmentation(checked: CheckedFile) -> Found:
    found = wrong_annotations(checked, lambda a: a.mask.kind == "empty")
    # Where no mask is left, this is why.
    lost = checked.masks and checked.training and not any(a.mask.usable for a in checked.file.annotations)
    return Found(found, severity=ERROR if lost else None)


def _mask_missing(checked: CheckedFile) -> list[str]:
    missing = wrong_annotations(checked, lambda a: a.mask.kind == "absent")
    return missing if len(missing) < len(checked.file.annotations) else []


def _uncompressed_rle(checked: CheckedFile) -> list[str]:
    # COCO's own files have crowds as uncompressed RLE, among polygons.
    crowds = not any(map(not_crowd, checked.file.annotations))
    return wrong_annotations(checked, lambda a: a.mask.kind == "counts" and (crowds or not_crowd(a)))


CHECKS = {
    "no_mask": error(
        "masks are wanted, but no annotation has a usable one",
        "stops in the first step: it has no masks to learn from",
        "take a file with segmentation, or write MODEL.MASK_ON False",
        _no_mask,
    ),
    "broken_mask": error(
        "segmentation that is no mask",
        "stops with an error when it loads the file or comes to the image",
        "write polygons [[x, y, x, y, ...], ...] or an RLE {size: [height, width], counts}",
        _broken_mask,
    ),
    "rle_size": error(
        "RLE of another size than the image",
        "stops with an AssertionError when it comes to the image",
        "write the mask at the size [height, width] of the image",
        _rle_size,
    ),
    "short_polygon": warning(
        "polygon of fewer than 3 points, or with half a point",
        "leaves the polygon out, and the object too if it has no other",
        "draw it again, or take it out",
        annotations(lambda a: a.mask.short > 0),
    ),
    "empty_segmentation": warning(
        "empty segmentation",
        "with masks on stops with a KeyError when it comes to the image; here the object is left out",
        "draw the mask",
        _empty_segmentation,
    ),
    "mask_missing": warning(
        "no segmentation where other annotations have one",
        "with masks on stops with a KeyError when it comes to the image; here the object is left out",
        "draw the mask",
        _mask_missing,
    ),
    "uncompressed_rle": warning(
        "mask as an uncompressed RLE",
        "compresses it when it loads the file",
        "write compressed RLE or polygons",
        _uncompressed_rle,
    ),
}
