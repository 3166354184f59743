from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
from pycocotools import mask as mask_util

from nonlocal_det.detection.annotations.coco_writer import mask_box, mask_to_polygons, write_coco


def rasterise(polygons, shape):
    return mask_util.decode(mask_util.merge(mask_util.frPyObjects(polygons, *shape))).astype(bool)


def random_masks():
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 50, (60, 2)):
        yield rng.random(size) < rng.random()  # single pixels, diagonal neighbours, holes, islands in holes
        coarse = cv2.resize(rng.random((5, 5)), (int(size[1]), int(size[0])), interpolation=cv2.INTER_LINEAR)
        yield coarse > 0.5  # round shapes


def test_polygons_rasterise_to_the_mask_that_they_were_made_of():
    for mask in random_masks():
        if mask.any():
            assert np.array_equal(rasterise(mask_to_polygons(mask), mask.shape), mask)


def test_a_square_has_four_corners_on_its_edges():
    mask = np.zeros((10, 12), bool)
    mask[2:5, 3:9] = True
    (polygon,) = mask_to_polygons(mask)
    corners = set(zip(polygon[::2], polygon[1::2], strict=True))
    assert corners == {(3, 2), (9, 2), (9, 5), (3, 5)}
    assert len(polygon) == 8
    assert mask_box(mask) == [3, 2, 6, 3]


def test_a_ring_is_cut_so_that_its_hole_stays_open():
    mask = np.ones((9, 9), bool)
    mask[3:6, 3:6] = False
    polygons = mask_to_polygons(mask)
    assert len(polygons) == 2
    assert np.array_equal(rasterise(polygons, mask.shape), mask)


def test_an_empty_mask_has_no_polygons():
    assert mask_to_polygons(np.zeros((4, 4), bool)) == []


def test_written_set_has_ids_and_pictures_in_order(tmp_path):
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (20, 30, 3), np.uint8) for _ in range(2)]
    write_coco(
        tmp_path / "set", [(pixels[0], [{"area": 1}, {"area": 2}]), (pixels[1], [{"area": 3}])], [], {}
    )
    document = json.loads((tmp_path / "set" / "annotations.json").read_text())
    assert [(a["id"], a["image_id"], a["area"]) for a in document["annotations"]] == [
        (1, 1, 1),
        (2, 1, 2),
        (3, 2, 3),
    ]
    for image, drawn in zip(document["images"], pixels, strict=True):
        assert (image["width"], image["height"]) == (30, 20)
        read = cv2.imread(str(tmp_path / "set" / "images" / image["file_name"]))[..., ::-1]
        assert np.array_equal(read, drawn)


def test_an_interrupted_set_has_no_json(tmp_path):
    def pictures():
        yield np.zeros((8, 8, 3), np.uint8), []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_coco(tmp_path, pictures(), [], {})
    assert not (tmp_path / "annotations.json").exists()
