"""What the built-in data sets are for: is the class or the side right that only distant pixels tell?

Everywhere ``truth`` is the content of an annotation file, and ``results`` are a model's results on it, as
COCO has them. ``edges`` of bins are in pixels, ascending; before the first and after the last are bins, too.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

DISTANCE_EDGES = (40, 80, 120)
"""Beyond 160 pixels the built-in data set has 4 squares, too few for a bin."""

SIDE_EDGES = (30, 60, 90)
"""The same for pairs of keypoints, by their distance to the head."""

_IOU = 0.5
_PARTS = ("shoulder", "elbow", "wrist", "hip", "knee", "ankle")


def probe(annotations: Path, predictions: Path) -> dict[str, Any]:
    """Compute what the annotations of a data set allow, from its file and that of a model's results.

    Returns:
        "distance" (see :func:`by_distance`) where distances are recorded, "left_hands" and "sides" (see
        :func:`left_hands` and :func:`sides_by_distance`) where the way that persons face is, and the model
        predicts keypoints.

    Raises:
        OSError: a file cannot be read.
    """
    truth = json.loads(annotations.read_text(encoding="utf-8"))
    results = json.loads(predictions.read_text(encoding="utf-8"))
    objects = truth.get("annotations", [])
    found: dict[str, Any] = {}
    if objects and all("distance" in one and "disc" in one for one in objects):
        found["distance"] = by_distance(truth, results)
    names = (truth.get("categories") or [{}])[0].get("keypoints")
    faced = objects and names and all("facing" in one and "keypoints" in one for one in objects)
    if faced and all("keypoints" in one for one in results):
        found["left_hands"] = left_hands(truth, results)
        if rows := sides_by_distance(truth, results):
            found["sides"] = rows
    return found


def by_distance(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], edges: Sequence[float] = DISTANCE_EDGES
) -> list[dict[str, Any]]:
    """Sort objects by the distance to what tells their class.

    An object counts as found if a detection of any class has an IoU above 0.5 with it; its class is that of
    the detection with the highest score among these. For box AP, objects of other bins are ignored, and so
    are false detections whose centre has a distance of another bin: COCO's rules for ranges of area.

    Args:
        truth: every annotation has "distance", and "disc" (x, y, radius).
        results: with boxes.
        edges: those of the bins of distance.

    Returns:
        For each bin that has objects: "low" and "high" (None: no end), "objects", "found", "right" (their
        class), and "AP" (0 to 100).
    """
    ends = [0.0, *map(float, edges), float("inf")]
    chosen = _best_detections(truth["annotations"], results)
    precision = _precision_by_distance(truth, results, ends)
    bins = []
    for index, (low, high) in enumerate(pairwise(ends)):
        objects = [one for one in truth["annotations"] if low <= one["distance"] < high]
        if objects:
            found = [(one, chosen[one["id"]]) for one in objects if one["id"] in chosen]
            right = [one["category_id"] == detection["category_id"] for one, detection in found]
            values = precision[:, :, :, index, -1]
            values = values[values > -1]
            ap = 100 * float(values.mean()) if values.size else None
            bins.append({**_bin(low, high, len(objects), len(found), sum(right)), "AP": ap})
    return bins


def _bin(low: float, high: float, objects: int, found: int, right: int) -> dict[str, Any]:
    end = None if high == float("inf") else high
    return {"low": low, "high": end, "objects": objects, "found": found, "right": right}


def left_hands(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the persons whose left and right wrists are told apart.

    Of each person with both wrists labelled, the detection with the highest score above an IoU of 0.5 is
    taken. Its hands are right if the two predicted wrists lie nearer to the true ones as they are than
    exchanged (by the sum of the two distances). Both in one place are not: what a model predicts for
    keypoints that look alike to it.

    Returns:
        "objects", how many persons have both wrists; "found" of them; "right", those with their hands right.
    """
    pairs = _pairs(truth, results, ("wrist",))
    found = [right for _, right in pairs if right is not None]
    return {"objects": len(pairs), "found": len(found), "right": sum(found)}


def sides_by_distance(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], edges: Sequence[float] = SIDE_EDGES
) -> list[dict[str, Any]]:
    """Sort pairs of keypoints, shoulders to ankles, by how far they are from the head that tells their sides.

    A pair is right as the hands are in :func:`left_hands`. The distance is that of the middle between the
    two to the middle between the ears, of persons with both ears labelled.

    Returns:
        For each bin that has pairs: "low" and "high" (None: no end), "objects" (the pairs), "found" (those of
        persons that are found), and "right".
    """
    ends = [0.0, *map(float, edges), float("inf")]
    pairs = _pairs(truth, results, _PARTS)
    bins = []
    for low, high in pairwise(ends):
        inside = [right for distance, right in pairs if distance is not None and low <= distance < high]
        if inside:
            found = [right for right in inside if right is not None]
            bins.append(_bin(low, high, len(inside), len(found), sum(found)))
    return bins


def _pairs(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> list[tuple[float | None, bool | None]]:
    """Return, for each labelled pair of keypoints, its distance to the head and whether its sides are right.

    The distance is None without both ears, the other where no detection overlaps the person.
    """
    names = truth["categories"][0]["keypoints"]

    def indices(part: str) -> list[int]:
        sides = [f"left_{part}", f"right_{part}"]
        return [names.index(side) for side in sides] if set(sides) <= set(names) else []

    ears = indices("ear")
    chosen = _best_detections(truth["annotations"], results)
    pairs = []
    for one in truth["annotations"]:
        points = np.asarray(one["keypoints"], float).reshape(-1, 3)
        head = points[ears, :2].mean(0) if ears and (points[ears, 2] > 0).all() else None
        for sides in filter(None, map(indices, parts)):
            if not (points[sides, 2] > 0).all():
                continue
            true = points[sides, :2]
            right = None
            if one["id"] in chosen:
                found = np.asarray(chosen[one["id"]]["keypoints"], float).reshape(-1, 3)[sides, :2]
                exchanged = np.linalg.norm(true - found[::-1], axis=1).sum()
                right = bool(np.linalg.norm(true - found, axis=1).sum() < exchanged)
            distance = None if head is None else float(np.linalg.norm(true.mean(0) - head))
            pairs.append((distance, right))
    return pairs


def _best_detections(
    objects: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """Return annotation id -> the detection with the highest score of those that overlap it enough."""
    by_image: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for result in sorted(results, key=lambda result: -result["score"]):
        by_image[result["image_id"]].append(result)
    chosen = {}
    for one in objects:
        for result in by_image[one["image_id"]]:
            if mask_utils.iou([result["bbox"]], [one["bbox"]], [False])[0, 0] > _IOU:
                chosen[one["id"]] = result
                break
    return chosen


def _precision_by_distance(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], ends: Sequence[float]
) -> np.ndarray:
    """Return COCO's precision [T, R, K, A, M] with bins of distance in the place of ranges of area."""
    discs = {one["image_id"]: one["disc"] for one in truth["annotations"]}
    objects = [{**one, "area": one["distance"]} for one in truth["annotations"]]
    detections = [
        {**one, "id": number, "iscrowd": 0, "area": _distance(one["bbox"], discs[one["image_id"]])}
        for number, one in enumerate(results, start=1)
        if one["image_id"] in discs
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        indexed = [COCO(), COCO()]
        for coco, annotations in zip(indexed, (objects, detections), strict=True):
            coco.dataset = {**truth, "annotations": annotations}
            coco.createIndex()
        evaluation = COCOeval(*indexed, "bbox")
        # Both ends belong to a range there. Distances come in quarters of a pixel.
        evaluation.params.areaRng = [[low, high - 1e-6] for low, high in pairwise(ends)]
        evaluation.params.areaRngLbl = [str(low) for low in ends[:-1]]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval["precision"]


def _distance(box: Sequence[float], disc: Sequence[float]) -> float:
    return float(np.hypot(box[0] + box[2] / 2 - disc[0], box[1] + box[3] / 2 - disc[1]))
