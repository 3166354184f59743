"""Annotation files are read once a process, however many parts of a run need them."""

import copy
import json
import os
import sys
from collections import Counter

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from PIL import Image

from nonlocal_det.detection.annotations.documents import (
    keep_file,
    lend_document,
    release_documents,
    take_document,
)
from nonlocal_det.detection.annotations.fixes import mend
from nonlocal_det.detection.evaluation import COCOEvaluator
from nonlocal_det.tools import train
from nonlocal_det.upstream import annotation_files_from

_opened: Counter[str] | None = None


def _count(event, arguments):
    if event == "open" and _opened is not None:
        _opened[str(arguments[0])] += 1


sys.addaudithook(_count)  # which nothing can take away again


@pytest.fixture
def opened():
    """How often each file is opened from here on, by path."""
    global _opened
    _opened = Counter()
    yield _opened
    _opened = None
    release_documents()


def document():
    points = [10, 12, 2, 40, 44, 2]
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 64, "height": 64} for i in range(1, 5)],
        "categories": [
            {"id": 1, "name": "nut", "keypoints": ["left_end", "right_end"], "skeleton": [[1, 2]]}
        ],
        "annotations": [
            {
                "id": i,
                "image_id": i,
                "category_id": 1,
                "bbox": [8, 8, 40, 40],
                "area": 1600,
                "iscrowd": 0,
                "segmentation": [[8, 8, 48, 8, 48, 48, 8, 48]],
                "keypoints": list(points),
                "num_keypoints": 2,
            }
            for i in range(1, 5)
        ],
    }


@pytest.fixture
def files(tmp_path):
    """Two data sets: entries for DATASETS.REGISTER."""
    (tmp_path / "images").mkdir()
    for i in range(1, 5):
        Image.fromarray(np.full((64, 64, 3), 40 * i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
    names = ("once_train", "once_val")
    for name in names:
        (tmp_path / f"{name}.json").write_text(json.dumps(document()))
    yield [[name, str(tmp_path / f"{name}.json"), str(tmp_path / "images")] for name in names]
    for name in names:
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


@pytest.mark.usefixtures("fresh_logging")
@pytest.mark.parametrize(("flags", "kept"), [([], []), (["--eval-only"], ["once_val"])])
def test_a_run_reads_each_file_once(files, opened, small_options, tmp_path, flags, kept):
    options = {
        "DATASETS.REGISTER": files,
        "DATASETS.TRAIN": ("once_train",),
        "DATASETS.TEST": ("once_val",),
        "MODEL.KEYPOINT_ON": True,
        "SOLVER.MAX_ITER": 2,
        "TEST.EVAL_PERIOD": 1,
        "TEST.VAL_LOSS": True,
        "OUTPUT_DIR": str(tmp_path / "out"),
        "SEED": 1,
    }
    config = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
    assert train.main(["--config-file", config, *flags, *map(str, small_options(options))]) == 0
    assert [opened[json_file] for _, json_file, _ in files] == [1, 1]
    # A finished training keeps nothing; a test keeps what the next one would read again.
    for _, json_file, _ in files:
        lend_document(json_file)
    assert [opened[json_file] for _, json_file, _ in files] == [
        1 if name in kept else 2 for name, *_ in files
    ]


def test_loading_and_evaluating_leave_the_document_as_it_is(files, opened):
    (_, json_file, images) = files[1]
    with annotation_files_from(lend_document):
        first = load_coco_json(json_file, images)
        second = load_coco_json(json_file, images)
    assert first == second == load_coco_json(json_file, images)
    assert first[0]["annotations"][0]["keypoints"] == [10.5, 12.5, 2, 40.5, 44.5, 2]
    MetadataCatalog.get("once_val").set(json_file=json_file, thing_classes=["nut"])
    assert COCOEvaluator("once_val")._coco_api.dataset == document()
    assert lend_document(json_file) == document()
    assert opened[json_file] == 2  # once by us, once by Detectron2 itself


def test_what_is_lent_may_be_mended(files, opened):
    (_, json_file, _) = files[0]
    broken = document()
    for annotation in broken["annotations"]:
        del annotation["area"], annotation["iscrowd"]
        annotation["image_id"] = float(annotation["image_id"])
    broken["categories"][0]["id"] = 3.0
    with open(json_file, "w") as file:
        json.dump(broken, file)
    lent = lend_document(json_file)
    assert mend(lent)
    assert lent != broken
    assert lend_document(json_file) == broken


def test_taken_is_forgotten_and_changed_is_read_again(files, opened):
    (_, json_file, _) = files[0]
    assert keep_file(json_file) is keep_file(json_file)
    taken = take_document(json_file)
    assert opened[json_file] == 1
    assert taken == document()
    changed = copy.deepcopy(taken)
    changed["categories"][0]["name"] = "walnut"
    keep_file(json_file)
    with open(json_file, "w") as file:
        json.dump(changed, file)
    os.utime(json_file, ns=(1, 1))
    assert keep_file(json_file).categories[0]["name"] == "walnut"
    assert take_document(json_file) == changed
