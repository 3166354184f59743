from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections import Counter

import cv2
import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from pycocotools.coco import COCO

from nonlocal_det.detection.synthetic import datasets as builtin
from nonlocal_det.detection.synthetic.squares import draw_context, main, write_context
from nonlocal_det.media.canvas import make_rng

COUNT, SIZE, SEED = 40, 192, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("context")
    write_context(path, count=COUNT, size=SIZE, seed=SEED)
    return path


@pytest.fixture(scope="module")
def coco(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations.json"))


def objects(coco):
    return coco.loadAnns(coco.getAnnIds())


def picture(folder, number):
    return cv2.cvtColor(cv2.imread(str(folder / "images" / f"{number:06d}.png")), cv2.COLOR_BGR2RGB)


def test_the_pixels_are_the_same_everywhere():
    digest = hashlib.sha256()
    for index in range(4):
        image, annotations = draw_context(SIZE, make_rng(7, index, 0), index % 2)
        digest.update(image.tobytes())
        digest.update(json.dumps(annotations, sort_keys=True).encode())
    assert digest.hexdigest() == "3635176c05c82ebcdb5f025394b14063b461615066792fe98e80d791d1ed42b6"


def test_the_disc_alone_tells_the_class():
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    for index in range(20):
        red, squares = draw_context(SIZE, make_rng(3, index, 0), 0)
        blue, others = draw_context(SIZE, make_rng(3, index, 0), 1)
        assert [{**one, "category_id": 2} for one in squares] == others
        assert {one["category_id"] for one in squares} == {1}
        differs = (red != blue).any(axis=2)
        disc_x, disc_y, radius = squares[0]["disc"]
        inside = (x - disc_x) ** 2 + (y - disc_y) ** 2 <= (radius + 1) ** 2
        assert not differs[~inside].any()
        assert differs[inside].mean() > 0.9
        assert red[disc_y, disc_x].argmax() == 0
        assert blue[disc_y, disc_x].argmax() == 2
        for one in squares:  # no square touches the disc, whose colour would be near it
            left, top, width, height = one["bbox"]
            assert not inside[top - 2 : top + height + 2, left - 2 : left + width + 2].any()


def test_what_is_near_a_square_does_not_depend_on_its_class(folder, coco):
    """Means and standard deviations of the patch around each square: no feature tells the classes apart."""
    patches, classes = [], []
    for one in objects(coco):
        left, top, side, _ = one["bbox"]
        box = picture(folder, one["image_id"])[
            max(0, top - 3) : top + side + 3, max(0, left - 3) : left + side + 3
        ]
        patches.append([*box.mean(axis=(0, 1)), *box.std(axis=(0, 1)), side, left, top])
        classes.append(one["category_id"])
    patches, classes = np.array(patches, float), np.array(classes)
    first, second = patches[classes == 1], patches[classes == 2]
    error = np.sqrt(first.var(axis=0, ddof=1) / len(first) + second.var(axis=0, ddof=1) / len(second))
    assert (np.abs(first.mean(axis=0) - second.mean(axis=0)) / error).max() < 4


def test_classes_are_balanced(coco):
    by_image = {one["image_id"]: one["category_id"] for one in objects(coco)}
    assert Counter(by_image.values()) == {1: COUNT / 2, 2: COUNT / 2}
    # Neither order of a pair of pictures is the rule.
    assert len({by_image[number] for number in range(1, COUNT, 2)}) == 2
    counts = Counter(one["category_id"] for one in objects(coco))
    assert 0.8 < counts[1] / counts[2] < 1.25


def test_distances_are_between_the_centres(coco):
    for one in objects(coco):
        left, top, width, height = one["bbox"]
        x, y, _ = one["disc"]
        distance = math.dist((left + width / 2, top + height / 2), (x, y))
        assert one["distance"] <= distance < one["distance"] + 0.25
    distances = np.array([one["distance"] for one in objects(coco)])
    assert ((distances > 40) & (distances < 80)).sum() > 10
    assert (distances > 120).sum() > 5


def test_squares_are_grey_and_apart_and_inside(folder, coco):
    assert {one["disc"][2] for one in objects(coco)} == {28}
    for number in coco.getImgIds():
        squares = coco.loadAnns(coco.getAnnIds(imgIds=[number]))
        assert 1 <= len(squares) <= 3
        assert len({tuple(one["disc"]) for one in squares}) == 1
        pixels = picture(folder, number)
        assert pixels.shape == (SIZE, SIZE, 3)
        covered = np.zeros((SIZE, SIZE), int)
        for one in squares:
            left, top, side, height = one["bbox"]
            assert side == height
            assert 18 <= side <= 36
            assert min(left, top) >= 0
            assert max(left, top) + side <= SIZE
            covered[top : top + side, left : left + side] += 1
            inner = pixels[top + 3 : top + side - 3, left + 3 : left + side - 3].astype(int)
            assert np.ptp(inner, axis=2).max() == 0
            mask = coco.annToMask(one)
            assert mask.sum() == one["area"] == side * side
            assert mask[top : top + side, left : left + side].all()
        assert covered.max() == 1


def test_a_small_set_is_the_beginning_of_a_large_one(folder, tmp_path):
    assert main(["--output", str(tmp_path / "small"), "--count", "2", "--seed", str(SEED)]) == 0
    for name in ("000001.png", "000002.png"):
        assert (tmp_path / "small" / "images" / name).read_bytes() == (folder / "images" / name).read_bytes()


@pytest.mark.parametrize("size", [64, 320])
def test_other_sizes_scale(size):
    image, squares = draw_context(size, make_rng(0, 0, 0), 0)
    assert image.shape == (size, size, 3)
    assert squares[0]["disc"][2] == size * 28 // 192
    assert all(one["bbox"][2] >= size * 18 // 192 for one in squares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "63"], "--size is 63: give the side of the pictures in pixels, 64 to 2048"),
        (["--count", "0"], "--count is 0"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
def test_wrong_numbers_are_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--output", str(tmp_path / "out"), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_registered(tmp_path, monkeypatch):
    monkeypatch.setenv("NONLOCAL_DET_CACHE", str(tmp_path / "cache"))
    splits = {
        "nonlocal_context_train": builtin._Split(count=4, size=64, seed=0),
        "nonlocal_context_val": builtin._Split(count=2, size=64, seed=1),
    }
    monkeypatch.setattr(builtin, "_CONTEXT", splits)
    for name, split in splits.items():
        records = DatasetCatalog.get(name)
        assert len(records) == split.count
        assert {a["category_id"] for record in records for a in record["annotations"]} == {0, 1}
        assert MetadataCatalog.get(name).thing_classes == ["red", "blue"]
