"""Drawing of detections: size, place and colour, not the look."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from nonlocal_det.detection.visualization.instances import InstanceColors, draw_instances


def instances(size, boxes, classes=None, masks=False, keypoints=False) -> Instances:
    found = Instances(size)
    found.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    count = len(boxes)
    found.pred_classes = torch.tensor(classes or [0] * count, dtype=torch.int64)
    found.scores = torch.full((count,), 0.9)
    if masks:
        found.pred_masks = torch.zeros(count, *size, dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(found.pred_masks, boxes, strict=True):
            mask[y0:y1, x0:x1] = True
    if keypoints:
        centers = found.pred_boxes.get_centers()
        found.pred_keypoints = torch.cat([centers, torch.ones(count, 1)], dim=1)[:, None]
    return found


@pytest.mark.parametrize(
    ("size", "drawn"),
    [
        ((60, 80), (600, 800)),
        ((1, 2), (400, 800)),
        ((900, 1000), (900, 1000)),
        ((800, 3), (800, 3)),
        ((7, 2000), (7, 2000)),
        ((80, 81920), (8, 8192)),
    ],
)
def test_pictures_are_fitted(size, drawn):
    picture = np.zeros((*size, 3), np.uint8)
    for found in (instances(size, []), instances(size, [[0, 0, 2, 1]], masks=True, keypoints=True)):
        assert draw_instances(picture, found).shape == (*drawn, 3)


def test_things_are_where_they_belong():
    size = (60, 80)
    picture = np.full((*size, 3), 90, np.uint8)
    found = instances(size, [[20, 30, 60, 50]], masks=True, keypoints=True)

    drawn = draw_instances(picture, found).astype(int)

    assert (drawn[:280] == 90).all()  # above the box, which is 10 times as large here
    assert (drawn[320:480, 220:580].std(axis=2) > 5).mean() > 0.9  # the mask
    assert (drawn[:, 640:].std(axis=2) == 0).all()
    blue, green, red = drawn[400, 400]  # the keypoint
    assert red > 200
    assert max(blue, green) < 60
    # What was given is as it was.
    assert (picture == 90).all()
    assert found.image_size == size
    assert found.pred_boxes.tensor.tolist() == [[20, 30, 60, 50]]
    assert found.pred_keypoints[0, 0].tolist() == [40, 40, 1]


def test_nothing_found_leaves_the_picture():
    picture = np.random.default_rng(0).integers(0, 256, (900, 850, 3), dtype=np.uint8)
    np.testing.assert_array_equal(draw_instances(picture, instances((900, 850), [])), picture)


def test_an_instance_keeps_its_colour_from_frame_to_frame():
    size = (100, 100)
    colors = InstanceColors()
    one, two = colors(instances(size, [[0, 0, 40, 40], [50, 50, 90, 90]]))
    assert not np.array_equal(one, two)

    # In another order, moved a little; a newcomer of another class at a known place; one out of sight.
    moved = colors(instances(size, [[52, 50, 92, 90], [0, 0, 40, 40]], classes=[0, 1]))
    np.testing.assert_array_equal(moved[0], two)
    assert not any(np.array_equal(moved[1], other) for other in (one, two))
    (back,) = colors(instances(size, [[1, 0, 41, 40]]))
    np.testing.assert_array_equal(back, one)

    for _ in range(20):
        assert colors(instances(size, [])) == []
    (later,) = colors(instances(size, [[1, 0, 41, 40]]))
    assert not np.array_equal(later, one)


def test_colours_are_the_same_in_every_run():
    found = instances((100, 100), [[0, 0, 40, 40], [50, 50, 90, 90]])
    for first, second in zip(InstanceColors()(found), InstanceColors()(found), strict=True):
        np.testing.assert_array_equal(first, second)
