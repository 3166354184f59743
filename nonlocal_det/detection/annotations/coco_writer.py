"""Masks as polygons, and COCO-format data sets on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

ANNOTATIONS_FILE = "annotations.json"
IMAGES_FOLDER = "images"


def mask_to_polygons(mask: np.ndarray) -> list[list[int]]:
    """Return polygons along the edges of a mask's pixels: pycocotools rasterises them to that very mask.

    The mask is bool [height, width]. A polygon is a flat list x0, y0, x1, y1, ... in pixel edges, 0 to width
    and 0 to height. COCO's polygons have no holes: a part with a hole is cut in two, through the hole.
    """
    polygons: list[list[int]] = []
    count, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)
    for label in range(1, count):
        polygons.extend(_part_to_polygons(labels == label))
    return polygons


def _part_to_polygons(part: np.ndarray) -> list[list[int]]:
    """Do the work of :func:`mask_to_polygons` for one connected part, bool [height, width]."""
    # At twice the size every edge between pixels lies between an odd and an even position, so that a
    # contour's position p stands for the edge (p + 1) // 2, and parts one pixel wide do not collapse to
    # lines.
    large = part.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(large, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    if len(contours) == 1:
        return [_corners((contours[0][:, 0] + 1) // 2).ravel().tolist()]
    hole = next(contour for contour, links in zip(contours, hierarchy[0], strict=True) if links[3] >= 0)
    x, _, width, _ = cv2.boundingRect(hole)
    cut = (x + width // 2 + 1) // 2
    left, right = part.copy(), part.copy()
    left[:, cut:] = False
    right[:, :cut] = False
    return mask_to_polygons(left) + mask_to_polygons(right)


def _corners(path: np.ndarray) -> np.ndarray:
    """Drop repeated points and points on straight lines from a closed path, int [n, 2]."""
    path = path[np.any(path != np.roll(path, 1, axis=0), axis=1)]
    before, after = path - np.roll(path, 1, axis=0), np.roll(path, -1, axis=0) - path
    return path[before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]]


def mask_box(mask: np.ndarray) -> list[int]:
    """Return the tight box x, y, width, height, in pixels, of a mask (bool [height, width]) with pixels."""
    return list(cv2.boundingRect(mask.astype(np.uint8)))


def write_coco(
    directory: Path,
    pictures: Iterable[tuple[np.ndarray, list[dict[str, Any]]]],
    categories: list[dict[str, Any]],
    info: Mapping[str, Any],
) -> None:
    """Write a data set: ``annotations.json`` and ``images/000001.png``, ...; the JSON last.

    Image and annotation ids count from 1 in the order of ``pictures``.

    Args:
        directory: where to write; made where it does not exist.
        pictures: pairs of an RGB picture, uint8 [height, width, 3], and its annotations without ids.
        categories: COCO's "categories".
        info: COCO's "info".

    Raises:
        OSError: something could not be written.
    """
    (directory / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, (pixels, instances) in enumerate(pictures, start=1):
        name = f"{image_id:06d}.png"
        # Encoded here and written by Python: cv2.imwrite reports a full disk by a return value, without the
        # reason.
        encoded = cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 3])[1]
        (directory / IMAGES_FOLDER / name).write_bytes(encoded.tobytes())
        height, width = pixels.shape[:2]
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        for instance in instances:
            annotations.append({**instance, "id": len(annotations) + 1, "image_id": image_id})
    document = {"info": dict(info), "licenses": [], "categories": categories}
    document |= {"images": images, "annotations": annotations}
    # One write, so that an interrupted run leaves no JSON rather than half of one.
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    (directory / ANNOTATIONS_FILE).write_text(text, encoding="utf-8")
