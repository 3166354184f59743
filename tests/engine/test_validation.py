"""The validation loss: against a computation that shares none of its code, and without traces in the run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

import pycocotools.mask as mask_util
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.events import EventStorage
from PIL import Image
from torch import nn

from nonlocal_det import get_config
from nonlocal_det.data.random_states import random_states
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.validation import ValidationLoss

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x_nl.yaml"
#: With these all anchors and proposals count, so that nothing is drawn at random.
ALL = {"MODEL.RPN.BATCH_SIZE_PER_IMAGE": 100_000, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 1000}

pytestmark = pytest.mark.usefixtures("fresh_logging")


@pytest.fixture
def options(small_options, mini_coco, tmp_path):
    def make(test=("mini_val",), **changes) -> list:
        options = {
            "MODEL.RESNETS.DEPTH": 50,
            "MODEL.RESNETS.NORM": "BN",
            "DATASETS.TRAIN": ("mini_keypoints_train",),
            "DATASETS.TEST": tuple(test),
            "OUTPUT_DIR": str(tmp_path / "out"),
            "TEST.VAL_LOSS": True,
            **ALL,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return small_options(options)

    return make


@pytest.fixture
def config(options):
    return lambda *args, name=MASK, **changes: get_config(name, options(*args, **changes))


@pytest.fixture
def dataset(mini_coco, tmp_path):
    """A function that registers a changed copy of mini_val and returns its name."""
    names = []

    def make(name: str, change, kind: str = "instances") -> str:
        content = json.loads((mini_coco / f"coco/annotations/{kind}_val2017.json").read_text())
        change(content)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        register_coco_instances(name, {}, str(path), str(mini_coco / "coco" / "val2017"))
        names.append(name)
        return name

    yield make
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def build(cfg, seed: int = 0) -> nn.Module:
    """A model with batch norms that are not as they start."""
    torch.manual_seed(seed)
    model = build_model(cfg)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-0.1, 0.1)
    return model.train()


def naive(cfg, model: nn.Module, name: str) -> dict[str, float]:
    """The mean losses over the images of a COCO file."""
    metadata = MetadataCatalog.get(name)
    content = json.loads(Path(metadata.json_file).read_text())
    classes = {number: i for i, number in enumerate(sorted(x["id"] for x in content["categories"]))}
    sums: dict[str, float] = {}
    for image in content["images"]:
        pixels = Image.open(Path(metadata.image_root) / image["file_name"]).convert("RGB")
        factor = cfg.INPUT.MIN_SIZE_TEST / min(pixels.size)
        width, height = (int(side * factor + 0.5) for side in pixels.size)
        x, y = width / image["width"], height / image["height"]
        objects = [a for a in content["annotations"] if a["image_id"] == image["id"] and not a.get("iscrowd")]
        truth = Instances((height, width))
        # Rounded where Detectron2 rounds: anchors that overlap an object equally are told apart by that.
        corners = np.array([a["bbox"] for a in objects], dtype=np.float32).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        truth.gt_boxes = Boxes(corners.astype(np.float64) * [x, y, x, y])
        truth.gt_boxes.clip((height, width))
        truth.gt_classes = torch.tensor([classes[a["category_id"]] for a in objects], dtype=torch.int64)
        if objects:
            polygons = [
                [(np.array(p).reshape(-1, 2) * [x, y]).ravel() for p in a["segmentation"]] for a in objects
            ]
            truth.gt_masks = PolygonMasks(polygons)
            if cfg.MODEL.KEYPOINT_ON:
                points = np.array([a["keypoints"] for a in objects], dtype=np.float64).reshape(-1, 17, 3)
                # In COCO's files they are indices of pixels, whose centres are meant.
                truth.gt_keypoints = Keypoints((points + np.array([0.5, 0.5, 0])) * [x, y, 1])
        resized = np.asarray(pixels.resize((width, height), Image.Resampling.BILINEAR))
        tensor = torch.from_numpy(resized[:, :, ::-1].transpose(2, 0, 1).copy())
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        with torch.no_grad(), EventStorage():
            losses = model([{"image": tensor, "instances": truth, "width": 1, "height": 1}])
        for key, value in losses.items():
            sums[key] = sums.get(key, 0) + value.item() / len(content["images"])
    model.train()
    return {**sums, "total_loss": sum(sums.values())}


def without_objects(content: dict) -> None:
    """Make one image empty and one of crowds alone."""
    empty, crowd = (image["id"] for image in content["images"][1:3])
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != empty]
    for annotation in content["annotations"]:
        if annotation["image_id"] == crowd:
            annotation["iscrowd"] = 1
            size = next([i["height"], i["width"]] for i in content["images"] if i["id"] == crowd)
            annotation["segmentation"] = {"size": size, "counts": [size[0] * size[1]]}


@pytest.mark.parametrize("name", [MASK, KEYPOINT])
def test_it_is_the_mean_over_the_images_of_the_evaluation(config, dataset, name, recwarn):
    test = dataset("val_changed", without_objects, "person_keypoints" if name == KEYPOINT else "instances")
    cfg = config([test], name=name, MODEL__MASK_ON=True, MODEL__ROI_HEADS__NUM_CLASSES=80)
    model = build(cfg)
    expected = naive(cfg, model, test)
    recwarn.clear()
    found = ValidationLoss(cfg)(model)
    assert list(found) == [test]
    assert found[test] == pytest.approx(expected, rel=1e-4)
    assert {"total_loss", "loss_mask", "loss_rpn_loc"} <= expected.keys()
    assert ("loss_keypoint" in expected) == (name == KEYPOINT)
    assert min(expected.values()) > 0
    assert next(iter(found[test])) == "total_loss"
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize("name", [MASK, RETINANET])
def test_it_leaves_no_trace(config, name):
    cfg = config(name=name, **{key.replace(".", "__"): 32 for key in ALL})
    model = build(cfg)
    model.backbone.eval()  # modes may be mixed
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    states, validation = random_states(), ValidationLoss(cfg)
    with EventStorage() as storage:
        first = validation(model)
        assert not storage.latest()
    after = random_states()
    assert torch.equal(after["torch"], states["torch"])
    assert torch.equal(after["numpy"][0], states["numpy"][0])
    assert after["python"] == states["python"]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model, "loss_normalizer")
    # Anchors and proposals are drawn, but not other ones each time.
    torch.manual_seed(6)
    assert validation(model) == first
    assert ValidationLoss(cfg)(model) == first


def in_processes(options: list, folder: str) -> None:
    cfg = get_config(MASK, options)
    found = ValidationLoss(cfg)(build(cfg))
    name = "main" if found else "other"
    (Path(folder) / name).write_text(json.dumps(found))


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_it_is_the_same_in_two_processes(options, mini_coco, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(mini_coco))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Five images, so that one process has more than the other; what is drawn is no matter either.
    drawn = {key.replace(".", "__"): 16 for key in ALL}
    launch_processes(in_processes, 2, args=(options(["coco_2017_val"], **drawn), str(tmp_path)))
    cfg = get_config(MASK, options(["mini_val"], **drawn))
    expected = ValidationLoss(cfg)(build(cfg))["mini_val"]
    found = json.loads((tmp_path / "main").read_text())["coco_2017_val"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "other").read_text()) == {}


def test_data_sets_without_annotations_are_passed_over(config, dataset, caplog):
    def bare(content: dict) -> None:
        del content["annotations"]

    def crowds(content: dict) -> None:
        content["annotations"] = [
            {**a, "iscrowd": 1, "segmentation": {"size": [1, 1], "counts": [1]}}
            for a in content["annotations"]
        ]

    names = [dataset("val_bare", bare), "mini_val", dataset("val_crowds", crowds)]
    cfg = config(names)
    with caplog.at_level("INFO"):
        assert ValidationLoss(cfg)(build(cfg)).keys() == {"mini_val"}
    assert "val_bare has no annotations" in caplog.text
    assert "val_crowds has no annotations" in caplog.text


def test_masks_of_the_other_kind(config, dataset):
    """INPUT.MASK_FORMAT is found for the training data, where all masks may be polygons."""

    def as_rle(content: dict) -> None:
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        for a in content["annotations"][::2]:
            if not a["iscrowd"]:
                rle = mask_util.merge(mask_util.frPyObjects(a["segmentation"], *sizes[a["image_id"]]))
                a["segmentation"] = {"size": rle["size"], "counts": rle["counts"].decode()}

    cfg = config([dataset("val_rle", as_rle)])
    assert cfg.INPUT.MASK_FORMAT == "polygon"
    model = build(cfg)
    (found,) = ValidationLoss(cfg)(model).values()
    expected = naive(cfg, model, "mini_val")
    # Rounded to pixels of small images, but the same masks.
    assert found["loss_mask"] == pytest.approx(expected["loss_mask"], rel=0.02)
    assert found["loss_cls"] == pytest.approx(expected["loss_cls"], rel=1e-4)


def test_impossible_annotations_cost_their_images(config, dataset, caplog):
    def spoil(content: dict) -> None:
        ids = [image["id"] for image in content["images"][:2]]
        for annotation in content["annotations"]:
            if annotation["image_id"] in ids:
                annotation["segmentation"] = [["x"] * 6]

    def less(content: dict) -> None:
        content["images"] = content["images"][2:]
        kept = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]

    names = [dataset("val_spoilt", spoil), dataset("val_less", less)]
    cfg = config(names)
    found = ValidationLoss(cfg)(build(cfg))
    assert found["val_spoilt"] == pytest.approx(found["val_less"], rel=1e-5)
    (record,) = [record for record in caplog.records if "val_spoilt is without" in record.getMessage()]
    assert record.getMessage().count("(id ") == 2
    assert "\n" not in record.getMessage()


def test_a_model_that_has_diverged_is_nan(config):
    cfg = config()
    model = build(cfg)
    with torch.no_grad():
        model.proposal_generator.rpn_head.anchor_deltas.bias.fill_(math.nan)
    assert math.isnan(ValidationLoss(cfg)(model)["mini_val"]["total_loss"])
