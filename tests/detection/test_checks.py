"""What is found in the annotation files of a config's data sets before it is trained."""

import json
import logging

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image
from sound_file import COUNTS, sound

from nonlocal_det import ConfigError, get_config
from nonlocal_det.detection.checks import check_data


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("1.png", "2.png"):
        Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(folder / name)
    return folder


@pytest.fixture
def registered(tmp_path, pictures):
    names = []

    def make(name, document):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        names.append(name)
        return [name, str(tmp_path / f"{name}.json"), str(pictures)]

    yield make
    for name in names:
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


def config(train, test=(), *options):
    return get_config(
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml",
        [
            "DATASETS.REGISTER", [entry for i, entry in enumerate([*train, *test]) if entry not in train[:i]],
            "DATASETS.TRAIN", tuple(entry[0] for entry in train),
            "DATASETS.TEST", tuple(entry[0] for entry in test),
            *options,
        ],
    )  # fmt: skip


def test_before_training_warnings_are_logged(registered, caplog):
    document = sound()
    del document["annotations"][0]["area"]
    cfg = config([registered("pre_train", document)], [registered("pre_val", sound())])
    with caplog.at_level(logging.WARNING, logger="nonlocal_det.detection.checks"):
        check_data(cfg, training=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("pre_train: warning: area missing: 1 (annotation 1). Detectron2 ")


def test_before_training_errors_stop(registered):
    document = sound()
    document["annotations"][0]["bbox"] = [1, 1, 0, 0]
    document["annotations"][1]["iscrowd"] = 3
    cfg = config([registered("pre_train", sound())], [registered("pre_val", document)])
    with pytest.raises(
        ConfigError, match=r"^data set 'pre_val' \(.*pre_val.json\): .*\(and 1 more"
    ) as caught:
        check_data(cfg, training=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="pre_val"):
        check_data(cfg, training=False)
    cfg = config([registered("pre_train", document)], [registered("pre_val", sound())])
    check_data(cfg, training=False)


def test_before_training_a_test_set_may_have_no_annotations(registered):
    document = sound()
    del document["annotations"]
    check_data(config([registered("pre_train", sound())], [registered("pre_val", document)]), training=True)
    with pytest.raises(ConfigError, match="no annotation at all"):
        check_data(config([registered("pre_train2", document)]), training=True)


def test_before_training_a_bad_picture_costs_a_sample(registered, pictures, caplog):
    (pictures / "2.png").write_bytes(b"")
    train, test = registered("pre_train", sound()), registered("pre_val", sound())
    check_data(config([train]), training=True)
    assert "pre_train: warning: picture that cannot be read (training takes another" in caplog.text
    # The evaluation cannot do without it.
    for cfg in (config([train], [test]), config([train], [train])):
        with pytest.raises(ConfigError, match="picture that cannot be read: 1"):
            check_data(cfg, training=True)


def test_before_training_what_was_taken_from_the_files_is_logged(registered, caplog):
    document = sound()
    for category in document["categories"]:
        category["keypoints"] = ["left_end", "right_end"]
    document["annotations"][0]["segmentation"] = COUNTS
    train, test = registered("pre_train", document), registered("pre_val", document)
    with caplog.at_level(logging.INFO, logger="nonlocal_det.detection.checks"):
        check_data(config([train], [test], "MODEL.KEYPOINT_ON", True), training=True)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    what = (
        "has 2 classes (hazel, walnut): MODEL.ROI_HEADS.NUM_CLASSES 2; 2 keypoints (left_end, right_end), "
        "1 left and right: MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS 2; masks some as RLE: INPUT.MASK_FORMAT "
        "bitmask"
    )
    assert lines == [f"{name}: {path} {what}" for name, path, _ in (train, test)]


def test_before_training_the_projects_and_detectron2s_data_sets_are_left_alone(monkeypatch):
    monkeypatch.setattr("nonlocal_det.detection.checks.keep_file", lambda path: pytest.fail(f"read {path}"))
    check_data(get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"), training=True)
    names = ["DATASETS.TRAIN", ("nonlocal_people_train",), "DATASETS.TEST", ("nonlocal_people_val",)]
    check_data(get_config("COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x.yaml", names), training=True)
