from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det import ConfigError, get_config
from nonlocal_det.engine.checks import check_training
from nonlocal_det.engine.task import check_run
from nonlocal_det.errors import CheckpointError

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"


@pytest.fixture
def config(small_options, mini_coco, tmp_path):
    def make(**changes):
        options = {
            "DATASETS.TRAIN": ("mini_train",),
            "DATASETS.TEST": ("mini_val",),
            "OUTPUT_DIR": str(tmp_path / "out"),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return get_config(MASK, small_options(options))

    return make


def refused(match: str, function, *args, error: type[Exception] = ConfigError, **kwargs) -> None:
    with pytest.raises(error, match=match) as raised:
        function(*args, **kwargs)
    assert "\n" not in str(raised.value)


def test_a_right_config_passes(config, tmp_path):
    check_run(config())
    check_run(config(), processes=2)
    check_run(config(SOLVER__IMS_PER_BATCH=16, SOLVER__REFERENCE_WORLD_SIZE=8), processes=3)  # scaled to 6
    assert (tmp_path / "out").is_dir()


def test_mixed_precision_on_a_cpu(config):
    cfg = config(SOLVER__AMP__ENABLED=True)
    refused(r"SOLVER\.AMP\.ENABLED is True.*write SOLVER\.AMP\.ENABLED False", check_training, cfg)
    check_run(cfg, eval_only=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("key", ["MODEL.NONLOCAL.NORM", "MODEL.RESNETS.NORM", "MODEL.FPN.NORM"])
def test_synchronised_batch_norm_on_cpus(config, key):
    cfg = config(**{key: "SyncBN"})
    refused(re.escape(key) + " is 'SyncBN'.*naiveSyncBN", check_training, cfg, processes=2)
    check_training(cfg, processes=1)
    check_training(config(**{key: "naiveSyncBN"}), processes=2)
    check_run(cfg, processes=2, eval_only=True)


def test_batch_that_cannot_be_shared(config):
    refused("SOLVER.IMS_PER_BATCH is 3.*multiple of 2", check_training, config(SOLVER__IMS_PER_BATCH=3), 2)


@pytest.mark.parametrize("key", ["IMS_PER_BATCH", "MAX_ITER", "CHECKPOINT_PERIOD"])
def test_schedule_of_no_length(config, key):
    refused(f"SOLVER.{key} is 0: write 1 or more", check_training, config(**{"SOLVER." + key: 0}))


def test_early_stopping_without_evaluations(config):
    changes = {"SOLVER.IMS_PER_BATCH": 8, "SOLVER.REFERENCE_WORLD_SIZE": 1, "TEST.EVAL_PERIOD": 3}
    cfg = config(**changes, SOLVER__EARLY_STOP_PATIENCE=2)
    refused("EARLY_STOP_PATIENCE is 2.*EVAL_PERIOD 3.*write TEST.EVAL_PERIOD 8", check_training, cfg, 8)
    check_training(cfg, 2)
    check_training(config(**changes), 8)


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("MODEL.META_ARCHITECTURE", "MaskRCNN", "GeneralizedRCNN"),
        ("MODEL.BACKBONE.NAME", "build_resnet_fpn", "build_resnet_fpn_backbone"),
        ("MODEL.ANCHOR_GENERATOR.NAME", "Anchors", "DefaultAnchorGenerator"),
        ("MODEL.PROPOSAL_GENERATOR.NAME", "rpn", "PrecomputedProposals"),
        ("MODEL.RPN.HEAD_NAME", "", "StandardRPNHead"),
        ("MODEL.ROI_HEADS.NAME", "ROIHeads", "StandardROIHeads"),
        ("MODEL.ROI_BOX_HEAD.NAME", "FastRCNN", "FastRCNNConvFCHead"),
        ("MODEL.ROI_MASK_HEAD.NAME", "mask", "MaskRCNNConvUpsampleHead"),
        ("MODEL.ROI_KEYPOINT_HEAD.NAME", "keypoint", "NonLocalKeypointHead"),
        ("DATALOADER.NUM_WORKERS", -1, 0),
    ],
)
def test_names_of_parts(config, key, wrong, right):
    options = {"MODEL.NONLOCAL.RES4": "[]", key: wrong}
    if key != "MODEL.BACKBONE.NAME":
        options["MODEL.BACKBONE.NAME"] = "build_resnet_fpn_backbone"
    cfg = config(**options)
    for eval_only in (False, True):
        refused(rf"^{re.escape(key)} is {wrong!r}: .*\b{right}\b", check_run, cfg, eval_only=eval_only)
    cfg.merge_from_list([key, right])
    check_run(cfg)


def test_parts_of_other_architectures_are_their_own_affair(config):
    cfg = config(MODEL__META_ARCHITECTURE="RetinaNet", MODEL__ROI_HEADS__NAME="mine")
    cfg.MODEL.RETINANET.NUM_CLASSES = 80
    check_run(cfg)


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("SOLVER.LR_SCHEDULER_NAME", "Cosine", "WarmupCosineLR"),
        ("SOLVER.WARMUP_METHOD", "burnin", "constant"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model", "norm"),
        ("DATALOADER.SAMPLER_TRAIN", "WeightedTrainingSampler", "RepeatFactorTrainingSampler"),
        ("INPUT.RANDOM_FLIP", "Horizontal", "horizontal"),  # Detectron2 flips nothing then
        ("INPUT.MIN_SIZE_TRAIN_SAMPLING", "uniform", "range"),
        ("INPUT.CROP.TYPE", "random", "absolute_range"),
        ("INPUT.MASK_FORMAT", "rle", "bitmask"),
    ],
)
def test_choices_in_training(config, key, wrong, right):
    cfg = config(**{key: wrong})
    refused(rf"^{re.escape(key)} is '{wrong}': not known; write one of .*'{right}'", check_run, cfg)
    check_run(cfg, eval_only=True)
    check_run(config(**{key: right}))


def test_no_data_set(config):
    refused(r"DATASETS\.TRAIN is \(\)", check_run, config(DATASETS__TRAIN=()))
    refused(r"DATASETS\.TEST is \(\)", check_run, config(DATASETS__TEST=()), eval_only=True)
    check_run(config(DATASETS__TEST=()))


@pytest.mark.parametrize("key", ["DATASETS.TRAIN", "DATASETS.TEST"])
def test_unknown_data_set(config, key):
    cfg = config(**{key: ("coco_2017_vall",)})
    refused(rf"{re.escape(key)} names 'coco_2017_vall'.*did you mean coco_2017_val", check_run, cfg)


def test_data_set_without_its_files(config, tmp_path, monkeypatch):
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets import register_coco_instances

    json_file = tmp_path / "datasets" / "gone" / "train.json"
    register_coco_instances("gone_train", {}, str(json_file), str(tmp_path / "images"))
    cfg = config(DATASETS__TRAIN=("gone_train",))
    try:
        refused(rf"annotations are looked for at {json_file}: not there; correct the path", check_run, cfg)
        monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "datasets"))
        refused("DETECTRON2_DATASETS to the folder that holds gone/", check_run, cfg)
        check_run(cfg, eval_only=True)  # which does not read it
        json_file.parent.mkdir(parents=True)
        json_file.write_text("{}")
        refused(rf"its images are looked for at {tmp_path / 'images'}", check_run, cfg)
    finally:
        from detectron2.data import DatasetCatalog

        DatasetCatalog.remove("gone_train")
        MetadataCatalog.remove("gone_train")


def test_output_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("")
    refused("OUTPUT_DIR is .*cannot be made", check_run, config(OUTPUT_DIR=str(tmp_path / "file" / "out")))
    refused("OUTPUT_DIR is .*cannot be made", check_run, config(OUTPUT_DIR=str(tmp_path / "file")))


def test_weights_that_are_not_there(config, tmp_path):
    cfg = config(MODEL__WEIGHTS=str(tmp_path / "none.pth"))
    refused("no such file", check_run, cfg, error=CheckpointError)
    refused("no such file", check_run, cfg, resume=True, error=CheckpointError)
    (tmp_path / "out" / "last_checkpoint").write_text("model_final.pth")
    check_run(cfg, resume=True)  # which will not read them


def test_fewer_classes_than_the_data_has(config, monkeypatch, data_dir):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(data_dir))
    coco = {"DATASETS__TRAIN": ("coco_2017_train",), "DATASETS__TEST": ("coco_2017_val",)}
    cfg = config(**coco, MODEL__ROI_HEADS__NUM_CLASSES=3)
    refused(r"MODEL\.ROI_HEADS\.NUM_CLASSES is 3: .*coco_2017_train.*write 80", check_run, cfg)
    check_run(config(**coco, MODEL__ROI_HEADS__NUM_CLASSES=80))


def test_keypoints_on_data_without_any(config, data_dir):
    cfg = config(DATASETS__TRAIN=("coco_2017_train",), MODEL__KEYPOINT_ON=True)
    refused(r"DATASETS\.TRAIN names 'coco_2017_train': it has no keypoints", check_run, cfg)
