"""COCO results as a file, the ids of pictures, and the points that are worth a look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, Instances

from nonlocal_det.detection.results import image_ids, results_file, strongest_centers


def found(boxes: list[list[float]], scores: list[float]) -> Instances:
    instances = Instances((80, 100))
    instances.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4))
    instances.scores = torch.tensor(scores)
    instances.pred_classes = torch.zeros(len(scores), dtype=torch.long)
    return instances


def test_a_file_is_whole_or_absent(tmp_path):
    metadata = Metadata(thing_dataset_id_to_contiguous_id={7: 0})
    path = tmp_path / "new" / "r.json"
    with results_file(str(path), metadata) as results:
        for image_id in (3, 4):
            results.add(found([[1, 2, 11, 22]], [0.5]), image_id, f"{image_id}.png")
        assert not path.exists()
    assert results.count == 2
    rows = [{"bbox": [1, 2, 10, 20], "score": 0.5, "category_id": 7} for _ in range(2)]
    expected = [{**row, "image_id": k, "file_name": f"{k}.png"} for row, k in zip(rows, (3, 4), strict=True)]
    assert json.loads(path.read_text()) == expected
    with pytest.raises(ZeroDivisionError), results_file(str(path), metadata):
        raise ZeroDivisionError
    assert json.loads(path.read_text()) == expected
    assert len(list(path.parent.iterdir())) == 1


def test_ids_are_the_numbers_of_the_names_if_all_differ():
    assert image_ids([Path("000000000785.jpg"), Path("b/12.png")]) == [785, 12]
    assert image_ids([Path("12.jpg"), Path("0012.jpg")]) == [1, 2]
    assert image_ids([Path("12.jpg"), Path("a.jpg"), Path("7.jpg")]) == [1, 2, 3]


def test_strongest_centers_are_of_different_things():
    boxes = [[0, 0, 10, 10], [1, 0, 11, 10], [40, 40, 60, 60], [90, 70, 100, 90], [20, 20, 30, 30]]
    instances = found(boxes, [0.8, 0.9, 0.7, 0.6, 0.5])
    assert strongest_centers(instances, 3) == [(6.5, 5.5), (50.5, 50.5), (95.5, 79.5)]
    assert strongest_centers(found([], []), 3) == []
