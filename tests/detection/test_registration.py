"""Data sets named in the config: paths, what their files decide, contradictions, and every process."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
import yaml
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data.detection_utils import create_keypoint_hflip_indices
from PIL import Image

from nonlocal_det import ConfigError, get_config
from nonlocal_det.detection.annotations.keypoints import flip_pairs, oks_sigmas
from nonlocal_det.detection.registration import summarize

NUCLEI = Path(__file__).parents[2] / "../shared/data/nuclei"
MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT_RCNN = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x.yaml"
POLYGON = [[2, 2, 12, 2, 12, 12, 2, 12]]
RLE = {"size": [32, 40], "counts": [100, 20, 1160]}


@pytest.fixture(autouse=True)
def clean_catalogs():
    before = set(DatasetCatalog), set(MetadataCatalog)
    yield
    for name in set(DatasetCatalog) - before[0]:
        DatasetCatalog.remove(name)
    for name in set(MetadataCatalog) - before[1]:
        MetadataCatalog.remove(name)


def document(classes=("hazel", "walnut"), masks=(POLYGON, POLYGON), keypoints=None, names=None):
    categories = [{"id": 3 * i + 2, "name": name} for i, name in enumerate(classes)]
    if names is not None:
        categories[0]["keypoints"] = list(names)
        categories[0]["skeleton"] = [[1, 2], [2, 3]]
    annotations = [
        {"id": i, "image_id": 7, "category_id": 2, "bbox": [2, 2, 10, 10], "area": 100, "iscrowd": 0}
        for i in range(1, len(masks) + 1)
    ]
    for annotation, mask in zip(annotations, masks, strict=True):
        if mask is not None:
            annotation["segmentation"] = mask
        if keypoints is not None:
            annotation["keypoints"] = list(keypoints)
    return {
        "images": [{"id": 7, "file_name": "a.png", "width": 40, "height": 32}],
        "categories": categories,
        "annotations": annotations,
    }


@pytest.fixture
def nuts(tmp_path):
    """Write a data set; return the entry of DATASETS.REGISTER."""

    def write(name, content=None, folder="data"):
        (tmp_path / folder / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((32, 40, 3), np.uint8)).save(tmp_path / folder / "images" / "a.png")
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(content or document()))
        return [name, f"{folder}/{name}.json", f"{folder}/images"]

    return write


def config(entries, *opts, base=MASK_RCNN, test=()):
    names = tuple(entry[0] for entry in entries)
    train = tuple(name for name in names if name not in test)
    given = ["DATASETS.REGISTER", entries, "DATASETS.TRAIN", train, "DATASETS.TEST", test, *opts]
    return get_config(base, given)


def error(entries, *opts, **options):
    with pytest.raises(ConfigError) as caught:
        config(entries, *opts, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "expected"), [(MASK_RCNN, "ROI_HEADS"), (RETINANET, "RETINANET"), (KEYPOINT_RCNN, "ROI_HEADS")]
)
def test_class_count_comes_from_the_file(nuts, tmp_path, monkeypatch, base, expected):
    monkeypatch.chdir(tmp_path)
    # The keypoint config of the project sets 1 class: that is not the user's setting.
    assert config([nuts("nuts_train")], base=base).MODEL[expected].NUM_CLASSES == 2


def test_catalogs_are_filled(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config([nuts("nuts_train")])
    metadata = MetadataCatalog.get("nuts_train")
    assert metadata.thing_classes == ["hazel", "walnut"]
    assert metadata.thing_dataset_id_to_contiguous_id == {2: 0, 5: 1}
    assert metadata.evaluator_type == "coco"
    assert metadata.json_file == str(tmp_path / "data/nuts_train.json")
    (record,) = DatasetCatalog.get("nuts_train")
    assert record["file_name"] == str(tmp_path / "data/images/a.png")
    assert [obj["category_id"] for obj in record["annotations"]] == [0, 0]


def test_yaml_of_the_user(nuts, tmp_path, monkeypatch):
    entry = nuts("nuts_train", folder="deep/data")
    base = tmp_path / "deep" / "base.yaml"
    here = [entry[0], "data/nuts_train.json", "data/images"]
    shipped = Path(__file__).parents[2] / "configs" / MASK_RCNN
    base.write_text(f"_BASE_: {shipped}\nDATASETS:\n  TEST: ()\n  REGISTER: {[here]}\n")
    own = tmp_path / "own.yaml"
    own.write_text('_BASE_: deep/base.yaml\nDATASETS:\n  TRAIN: ("nuts_train",)\n')
    monkeypatch.chdir("/")
    cfg = get_config(own)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 2
    assert [
        ["nuts_train", str(tmp_path / "deep/data/nuts_train.json"), str(tmp_path / "deep/data/images")]
    ] == cfg.DATASETS.REGISTER
    own.write_text(own.read_text() + "MODEL:\n  ROI_HEADS:\n    NUM_CLASSES: 80\n")
    with pytest.raises(
        ConfigError,
        match=r"MODEL.ROI_HEADS.NUM_CLASSES is 80: .*nuts_train.json.* 2 classes \(hazel, walnut\)",
    ):
        get_config(own)


def test_beside_the_config_file_comes_before_the_working_directory(nuts, tmp_path, monkeypatch):
    nuts("nuts_train", document(classes=["near"]), folder="near/data")
    entry = nuts("nuts_train", document(classes=["a", "b", "c"]))
    own = tmp_path / "near" / "own.yaml"
    own.write_text(f'DATASETS:\n  TEST: ()\n  TRAIN: ("nuts_train",)\n  REGISTER: {[entry]}\nVERSION: 2\n')
    monkeypatch.chdir(tmp_path)
    assert get_config(own).MODEL.ROI_HEADS.NUM_CLASSES == 1
    (tmp_path / "near/data/nuts_train.json").unlink()
    assert get_config(own).MODEL.ROI_HEADS.NUM_CLASSES == 3


def test_command_line_as_text(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opts = [
        "DATASETS.REGISTER",
        str([nuts("nuts_train")]),
        "DATASETS.TRAIN",
        '("nuts_train",)',
        "DATASETS.TEST",
        "()",
    ]
    assert get_config(MASK_RCNN, opts).MODEL.ROI_HEADS.NUM_CLASSES == 2


def test_dumped_config_works_from_anywhere(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = config([nuts("nuts_train")])
    dumped = tmp_path / "output" / "config.yaml"
    dumped.parent.mkdir()
    dumped.write_text(first.dump())
    monkeypatch.chdir("/")
    assert yaml.safe_load(get_config(dumped).dump()) == yaml.safe_load(first.dump())


def test_every_process(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = nuts("nuts_train")
    config([entry])
    script = (
        "import json, sys; from nonlocal_det import get_config; from detectron2.data import DatasetCatalog; "
        "config, entry = sys.argv[1], json.loads(sys.argv[2]); opts = ['DATASETS.REGISTER', [entry]]; "
        "get_config(config, opts); get_config(config, opts); print(len(DatasetCatalog.get(entry[0])))"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", script, MASK_RCNN, json.dumps(entry)]
    assert subprocess.run(command, capture_output=True, check=True).stdout.strip().endswith(b"1")


def test_changed_file_is_read_again(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = nuts("nuts_train")
    assert config([entry]).MODEL.ROI_HEADS.NUM_CLASSES == 2
    nuts("nuts_train", document(classes=["only"]))
    assert config([entry]).MODEL.ROI_HEADS.NUM_CLASSES == 1


def test_unused_data_sets_decide_nothing(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = get_config(MASK_RCNN, ["DATASETS.REGISTER", [nuts("nuts_train")]])
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 80
    assert "nuts_train" in DatasetCatalog


@pytest.mark.parametrize(
    ("opts", "base", "parts"),
    [
        (
            ["MODEL.ROI_HEADS.NUM_CLASSES", "80"],
            MASK_RCNN,
            ["MODEL.ROI_HEADS.NUM_CLASSES is 80", "2 classes", "write 2"],
        ),
        (["MODEL.RETINANET.NUM_CLASSES", 80], RETINANET, ["MODEL.RETINANET.NUM_CLASSES is 80", "nuts_train"]),
        (
            ["DATASETS.TEST", ("coco_2017_val",)],
            MASK_RCNN,
            ["DATASETS.TEST", "'coco_2017_val' with 80 classes", "hazel"],
        ),
        (["DATASETS.REGISTER", [["a", "b"]]], MASK_RCNN, ["DATASETS.REGISTER", "nuts/images"]),
        (["DATASETS.REGISTER", [["a", "b", 3]]], MASK_RCNN, ["DATASETS.REGISTER", "nuts/images"]),
        (["DATASETS.REGISTER", "nuts"], MASK_RCNN, ["DATASETS.REGISTER"]),
        (["DATASETS.REGISTER", [["a", "b", "c"], ["a", "d", "e"]]], MASK_RCNN, ["'a' is there twice"]),
        (["DATASETS.REGISTER", [["nuts_train", "none.json", "c"]]], MASK_RCNN, ["none.json: no such file"]),
    ],
)
def test_contradictions_are_one_line(nuts, tmp_path, monkeypatch, opts, base, parts):
    monkeypatch.chdir(tmp_path)
    message = error([nuts("nuts_train")], *opts, base=base)
    for part in parts:
        assert part in message


def test_setting_that_agrees_or_is_not_used(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config([nuts("nuts_train")], "MODEL.ROI_HEADS.NUM_CLASSES", 2, "MODEL.RETINANET.NUM_CLASSES", 80)
    assert (cfg.MODEL.ROI_HEADS.NUM_CLASSES, cfg.MODEL.RETINANET.NUM_CLASSES) == (2, 80)


def test_train_and_val_must_have_the_same_classes(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, val = nuts("nuts_train"), nuts("nuts_val", document(classes=["walnut", "hazel"]))
    message = error([train, val], test=("nuts_val",))
    assert "'nuts_val' with 2 classes (walnut, hazel)" in message
    # Other ids for the same names in the same order are the same classes.
    other = document()
    for i, category in enumerate(other["categories"]):
        category["id"] = i
    for annotation in other["annotations"]:
        annotation["category_id"] = 0
    config([train, nuts("nuts_val", other)], test=("nuts_val",))


def test_name_of_another_data_set(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = nuts("coco_2017_train")
    with pytest.raises(ConfigError, match=r"'coco_2017_train'.*another name"):
        get_config(
            MASK_RCNN,
            ["DATASETS.REGISTER", [entry], "DATASETS.TEST", (), "DATASETS.TRAIN", ("coco_2017_train",)],
        )


@pytest.mark.parametrize(
    ("masks", "expected"),
    [((POLYGON, POLYGON), "polygon"), ((POLYGON, RLE), "bitmask"), ((RLE, RLE), "bitmask")],
)
def test_mask_format_and_records_that_the_mapper_takes(nuts, tmp_path, monkeypatch, masks, expected):
    monkeypatch.chdir(tmp_path)
    entry = nuts("nuts_train", document(masks=masks))
    cfg = config([entry])
    assert expected == cfg.INPUT.MASK_FORMAT
    (record,) = DatasetCatalog.get("nuts_train")
    assert len(DatasetMapper(cfg)(record)["instances"].gt_masks) == 2
    assert config([entry], "INPUT.MASK_FORMAT", "bitmask").INPUT.MASK_FORMAT == "bitmask"
    if expected == "bitmask":
        assert "INPUT.MASK_FORMAT is 'polygon'" in error([entry], "INPUT.MASK_FORMAT", "polygon")


def test_crowd_rle_does_not_make_bitmasks(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = document(masks=(POLYGON, RLE))
    content["annotations"][1]["iscrowd"] = 1
    assert config([nuts("nuts_train", content)]).INPUT.MASK_FORMAT == "polygon"


@pytest.mark.parametrize("missing", [0, 1])
def test_objects_without_a_mask_are_left_out(nuts, tmp_path, monkeypatch, missing, caplog):
    monkeypatch.chdir(tmp_path)
    masks = [POLYGON, POLYGON]
    masks[missing] = []
    cfg = config([nuts("nuts_train", document(masks=masks))])
    with caplog.at_level(logging.WARNING, logger="nonlocal_det.detection.registration"):
        (record,) = DatasetCatalog.get("nuts_train")
    assert "without a mask, which are left out: 1 of 2" in caplog.text
    assert len(DatasetMapper(cfg)(record)["instances"].gt_masks) == 1


@pytest.mark.skipif(not NUCLEI.is_dir(), reason="needs ../shared/data/nuclei")
def test_real_file_with_polygons_and_rle():
    cfg = get_config(
        MASK_RCNN,
        [
            "DATASETS.REGISTER", [["nuclei", str(NUCLEI / "train.json"), str(NUCLEI / "images")]],
            "DATASETS.TRAIN", ("nuclei",),
            "DATASETS.TEST", (),
        ],
    )  # fmt: skip
    assert (cfg.MODEL.ROI_HEADS.NUM_CLASSES, cfg.INPUT.MASK_FORMAT) == (1, "bitmask")
    records = DatasetCatalog.get("nuclei")
    raw = json.loads((NUCLEI / "train.json").read_text())
    assert sum(len(record["annotations"]) for record in records) == len(raw["annotations"]) == 465
    # The mapper's masks against pycocotools on the raw file, at the picture's own size.
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.RANDOM_FLIP = (256,), "none"
    image = next(image for image in raw["images"] if (image["width"], image["height"]) == (256, 256))
    record = next(record for record in records if record["image_id"] == image["id"])
    masks = DatasetMapper(cfg)(record)["instances"].gt_masks.tensor
    expected = []
    for annotation in raw["annotations"]:
        if annotation["image_id"] == image["id"]:
            segmentation = annotation["segmentation"]
            if isinstance(segmentation, list):
                segmentation = mask_util.merge(mask_util.frPyObjects(segmentation, 256, 256))
            expected.append(torch.from_numpy(mask_util.decode(segmentation)).bool())
    assert torch.equal(masks, torch.stack(expected))


NAMES = ["left_tip", "right_tip", "stem"]
POINTS = [3, 3, 2, 8, 3, 2, 6, 9, 1]


def test_keypoints_come_from_the_file(nuts, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    entry = nuts("nuts_train", document(keypoints=POINTS, names=NAMES))
    with caplog.at_level(logging.INFO, logger="nonlocal_det.detection.registration"):
        cfg = config([entry], base=KEYPOINT_RCNN)
    assert cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS == 3
    assert cfg.TEST.KEYPOINT_OKS_SIGMAS == [0.05, 0.05, 0.05]
    assert "0.05" in caplog.text
    metadata = MetadataCatalog.get("nuts_train")
    assert metadata.keypoint_names == NAMES
    assert metadata.keypoint_flip_map == [("left_tip", "right_tip")]
    assert create_keypoint_hflip_indices("nuts_train") == [1, 0, 2]
    assert [rule[:2] for rule in metadata.keypoint_connection_rules] == [
        ("left_tip", "right_tip"),
        ("right_tip", "stem"),
    ]
    (record,) = DatasetCatalog.get("nuts_train")
    assert DatasetMapper(cfg)(record)["instances"].gt_keypoints.tensor.shape == (2, 3, 3)


def test_keypoint_contradictions(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = nuts("nuts_train", document(keypoints=POINTS, names=NAMES))
    message = error([entry], "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", 17, base=KEYPOINT_RCNN)
    assert "NUM_KEYPOINTS is 17" in message
    assert "3 keypoints (left_tip, right_tip, stem)" in message
    message = error([entry], "TEST.KEYPOINT_OKS_SIGMAS", [0.1, 0.1], base=KEYPOINT_RCNN)
    assert "TEST.KEYPOINT_OKS_SIGMAS is [0.1, 0.1]" in message
    assert "3" in message
    cfg = config([entry], "TEST.KEYPOINT_OKS_SIGMAS", [0.1, 0.2, 0.3], base=KEYPOINT_RCNN)
    assert cfg.TEST.KEYPOINT_OKS_SIGMAS == [0.1, 0.2, 0.3]
    other = nuts("nuts_val", document(keypoints=POINTS, names=["stem", "left_tip", "right_tip"]))
    assert "stem, left_tip, right_tip" in error([entry, other], base=KEYPOINT_RCNN, test=("nuts_val",))


def test_keypoints_without_names_and_objects_without_keypoints(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = document(keypoints=POINTS)
    del content["annotations"][0]["keypoints"]
    cfg = config([nuts("nuts_train", content)], base=KEYPOINT_RCNN)
    assert cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS == 3
    assert MetadataCatalog.get("nuts_train").keypoint_flip_map == []
    (record,) = DatasetCatalog.get("nuts_train")
    keypoints = DatasetMapper(cfg)(record)["instances"].gt_keypoints.tensor
    assert keypoints.shape == (2, 3, 3)
    assert keypoints[0, :, 2].tolist() == [0, 0, 0]


def test_lists_of_names_without_keypoints_are_ignored(nuts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config([nuts("nuts_train", document(names=NAMES))])
    assert not hasattr(MetadataCatalog.get("nuts_train"), "keypoint_names")


COCO_NAMES = [
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee",
    "left_ankle", "right_ankle",
]  # fmt: skip


def test_cocos_sigmas_for_cocos_names():
    # Published at cocodataset.org under "Keypoint Evaluation": sigma_i, nose to ankles.
    published = [26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89]  # thousandths
    sigmas, of_coco = oks_sigmas(COCO_NAMES)
    assert of_coco
    assert sigmas == pytest.approx([value / 1000 for value in published], abs=1e-12)
    assert oks_sigmas(COCO_NAMES[::-1]) == ([0.05] * 17, False)
    assert oks_sigmas([]) == ([], False)


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (["left_eye", "right_eye", "nose"], [(0, 1)]),
        (["Right Eye", "Left Eye"], [(1, 0)]),
        (["l_hand", "r_hand"], [(0, 1)]),
        (["eye_l", "eye_r"], [(0, 1)]),
        (["leftEar", "rightEar"], [(0, 1)]),
        (["LKnee", "RKnee"], [(0, 1)]),
        (["FRONT-LEFT", "FRONT-RIGHT", "BACK-LEFT", "BACK-RIGHT"], [(0, 1), (2, 3)]),
        (["left", "right"], [(0, 1)]),
        (["left_eye"], []),
        (["tip", "rim", "lid", "collar", "brightness"], []),
        ([], []),
    ],
)
def test_flip_pairs(names, pairs):
    assert flip_pairs(names) == [(names[a], names[b]) for a, b in pairs]


def test_cocos_flip_pairs():
    sides = [name.removeprefix("left_") for name in COCO_NAMES if name.startswith("left_")]
    assert flip_pairs(COCO_NAMES) == [(f"left_{side}", f"right_{side}") for side in sides]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda d: d.update(categories=[]), '"categories" is empty'),
        (lambda d: d["categories"][0].pop("name"), 'as "name"'),
        (lambda d: d["categories"][0].update(id="x"), 'a whole number as "id"'),
        (lambda d: d.pop("images"), 'it has no "images"'),
    ],
)
def test_unusable_categories(nuts, tmp_path, monkeypatch, change, part):
    monkeypatch.chdir(tmp_path)
    content = document()
    change(content)
    assert part in error([nuts("nuts_train", content)])


def test_two_keypoint_lists(nuts, tmp_path):
    content = document(keypoints=POINTS, names=NAMES)
    content["categories"][1]["keypoints"] = ["a", "b"]
    entry = nuts("nuts_train", content)
    with pytest.raises(ValueError, match=r"'hazel' has 3 keypoints and category 'walnut' has 2 others"):
        summarize(tmp_path / entry[1])
