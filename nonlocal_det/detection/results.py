"""What a detector found: as a file of COCO results, and the points that are worth a look."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from detectron2.data.catalog import Metadata
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Boxes, Instances, pairwise_iou

from nonlocal_det.files import whole_file
from nonlocal_det.media.inputs import make_folder


class ResultsFile:
    """A list of COCO results, written as it grows: what :func:`results_file` opens.

    Attributes:
        count: how many results it has.
    """

    def __init__(self, file: TextIO, metadata: Metadata) -> None:
        self.count = 0
        self._file = file
        to_contiguous = metadata.get("thing_dataset_id_to_contiguous_id") or {}
        self._category_ids = {contiguous: category for category, contiguous in to_contiguous.items()}

    def add(self, instances: Instances, image_id: int, file_name: str) -> None:
        """Append what was found in a picture.

        Args:
            instances: on the CPU, in the picture's coordinates. Not changed.
            image_id: the picture's.
            file_name: the picture's.
        """
        # A copy: upstream shifts the keypoints in place.
        copy = type(instances)(instances.image_size, **instances.get_fields())
        if copy.has("pred_keypoints"):
            copy.pred_keypoints = copy.pred_keypoints.clone()
        for result in instances_to_coco_json(copy, image_id):
            result["category_id"] = self._category_ids.get(result["category_id"], result["category_id"])
            result["file_name"] = file_name
            self._file.write((",\n" if self.count else "") + json.dumps(result))
            self.count += 1


@contextmanager
def results_file(path: str, metadata: Metadata) -> Iterator[ResultsFile]:
    """Write a file of COCO results; it is whole or absent.

    Args:
        path: the file; its folder is made.
        metadata: "thing_dataset_id_to_contiguous_id" says the ids of the categories, if it is there.

    Raises:
        UsageError: the folder cannot be made.
    """
    target = Path(path).expanduser()
    make_folder(target.parent)
    with whole_file(target) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write("[\n")
        yield ResultsFile(file, metadata)
        file.write("\n]\n")


def image_ids(pictures: Sequence[Path]) -> list[int]:
    """Return COCO's ids: the numbers that the files are named by if all differ, else 1, 2, 3, ..."""
    stems = [picture.stem for picture in pictures]
    if all(stem.isascii() and stem.isdecimal() for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers):
            return numbers
    return list(range(1, len(pictures) + 1))


def strongest_centers(instances: Instances, most: int) -> list[tuple[float, float]]:
    """Return the centres (x, y) of the strongest detections' boxes, those of different things.

    Args:
        instances: on the CPU, in the picture's coordinates.
        most: how many detections are taken at most.
    """
    chosen: list[int] = []
    boxes = instances.pred_boxes
    for index in instances.scores.argsort(descending=True, stable=True).tolist():
        # Two detections of one thing would give the same picture twice.
        if not chosen or pairwise_iou(boxes[index], boxes[chosen]).max() <= 0.5:
            chosen.append(index)
    height, width = instances.image_size
    # To a pixel's centre: the words on the screen are then exact.
    return [
        (min(int(x), width - 1) + 0.5, min(int(y), height - 1) + 0.5)
        for x, y in Boxes(boxes.tensor[chosen[:most]]).get_centers().tolist()
    ]
