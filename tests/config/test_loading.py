"""Settings: what is added, what is loaded, and every wrong one is one clear line."""

import re

import pytest
import torch
from detectron2.config import get_cfg

from nonlocal_det import ConfigError, add_nonlocal_config, get_config

NL = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINTS = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x_nl.yaml"


def error_of(config_file, opts=()):
    with pytest.raises(ConfigError) as caught:
        get_config(config_file, opts)
    message = str(caught.value)
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)
    return message


def test_defaults_are_the_documented_ones():
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    assert dict(cfg.MODEL.NONLOCAL) == {
        "BACKBONE": "build_resnet_fpn_backbone",
        "RES2": [],
        "RES3": [],
        "RES4": [],
        "RES5": [],
        "BLOCK": "non_local",
        "PAIRWISE": "embedded_gaussian",
        "REDUCTION": 2,
        "POOL": "input",
        "SCALE": True,
        "NORM": "",
        "INIT": "msra",
        "KEYPOINT_HEAD": 0,
    }


def test_adding_twice_keeps_what_was_set():
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    cfg.MODEL.NONLOCAL.RES4 = [-1]
    add_nonlocal_config(cfg)
    assert cfg.MODEL.NONLOCAL.RES4 == [-1]


def test_only_our_keys_are_added():
    stock, ours = get_cfg(), get_cfg()
    add_nonlocal_config(ours)
    del ours.MODEL["NONLOCAL"]
    del ours.DATASETS["REGISTER"], ours.DATASETS["ALLOW_OUTSIDE_IMAGE_ROOT"]
    del ours.SOLVER["SKIP_NONFINITE_STEPS"], ours.SOLVER["EARLY_STOP_PATIENCE"]
    del ours.DATALOADER["MAX_BAD_FRACTION"], ours.TEST["VAL_LOSS"]
    assert ours == stock


def test_path_comes_before_name(tmp_path, monkeypatch):
    by_name = get_config(NL)
    assert by_name.MODEL.NONLOCAL.RES4 == [-1]
    here = tmp_path / NL
    here.parent.mkdir()
    here.write_text("MODEL:\n  RESNETS:\n    DEPTH: 34\nVERSION: 2\n")
    monkeypatch.chdir(tmp_path)
    assert get_config(NL).MODEL.RESNETS.DEPTH == 34


def test_config_is_not_frozen_and_takes_overrides():
    cfg = get_config(
        NL, ["SOLVER.MAX_ITER", "7", "MODEL.NONLOCAL.RES3", [1, 2], "MODEL.NONLOCAL.SCALE", "False"]
    )
    assert (cfg.SOLVER.MAX_ITER, cfg.MODEL.NONLOCAL.RES3, cfg.MODEL.NONLOCAL.SCALE) == (7, [1, 2], False)
    cfg.OUTPUT_DIR = "elsewhere"


def test_device_is_cpu_only_where_nobody_set_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_config(NL).MODEL.DEVICE == "cpu"
    own = tmp_path / "own.yaml"
    own.write_text("MODEL:\n  DEVICE: meta\nVERSION: 2\n")
    assert get_config(own).MODEL.DEVICE == "meta"
    assert get_config(NL, ["MODEL.DEVICE", "meta"]).MODEL.DEVICE == "meta"
    assert "MODEL.DEVICE is 'cuda'" in error_of(NL, ["MODEL.DEVICE", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_config(NL).MODEL.DEVICE == "cuda"


@pytest.mark.parametrize(
    ("opts", "parts"),
    [
        (["MODEL.NONLOCAL.PAIRWISE", "dot"], ["MODEL.NONLOCAL.PAIRWISE", "'dot'", '"dot_product"']),
        (["MODEL.NONLOCAL.POOL", "output"], ["MODEL.NONLOCAL.POOL", "'output'", '"embedding"']),
        (["MODEL.NONLOCAL.NORM", "IN"], ["MODEL.NONLOCAL.NORM", "'IN'", '"GN"']),
        (["MODEL.NONLOCAL.NORM", "FrozenBN"], ["MODEL.NONLOCAL.NORM", "'FrozenBN'", "dead", '""']),
        (["MODEL.NONLOCAL.INIT", "xavier"], ["MODEL.NONLOCAL.INIT", "'xavier'", '"msra"']),
        (["MODEL.NONLOCAL.REDUCTION", "0"], ["MODEL.NONLOCAL.REDUCTION", "0", "2"]),
        (["MODEL.NONLOCAL.RES4", "5"], ["MODEL.NONLOCAL.RES4", "'5'", "[-1]"]),
        (["MODEL.NONLOCAL.RES4", "[0.5]"], ["MODEL.NONLOCAL.RES4", "[0.5]", "[-1]"]),
        (["MODEL.NONLOCAL.RES4", "[True]"], ["MODEL.NONLOCAL.RES4", "[True]", "[-1]"]),
        (["MODEL.NONLOCAL.RES4", "[]"], ["no block would be inserted", "MODEL.NONLOCAL.RES4 [-1]"]),
        (["MODEL.NONLOCAL.BACKBONE", "build_nonlocal_backbone"], ["MODEL.NONLOCAL.BACKBONE", "itself"]),
        (
            ["MODEL.NONLOCAL.BACKBONE", "vgg"],
            ["MODEL.NONLOCAL.BACKBONE", "'vgg'", "build_resnet_fpn_backbone"],
        ),
        (
            ["MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone"],
            ["RES4", "ignored", "build_nonlocal_backbone"],
        ),
        (["MODEL.NONLOCAL.KEYPOINT_HEAD", "2"], ["KEYPOINT_HEAD", "ignored", "MODEL.KEYPOINT_ON"]),
        (
            ["MODEL.KEYPOINT_ON", "True", "MODEL.NONLOCAL.KEYPOINT_HEAD", "2"],
            ["KEYPOINT_HEAD", "ignored", "KRCNNConvDeconvUpsampleHead", "NonLocalKeypointHead"],
        ),
        (["MODEL.NONLOCAL.SCALE", "1"], ["MODEL.NONLOCAL.SCALE", "'1'", "bool", "True"]),
        (["MODEL.NONLOCAL.PAIRWIZE", "gaussian"], ["no such key", "did you mean MODEL.NONLOCAL.PAIRWISE?"]),
        (["MODEL.DEPTH", "50"], ["no such key", "did you mean MODEL.RESNETS.DEPTH?"]),
        (["MODEL.NONLOCAL", "x"], ["MODEL.NONLOCAL is a group"]),
        (["SOLVER.BASE_LR"], ["KEY VALUE", "'SOLVER.BASE_LR'"]),
        (["SOLVER.BASE_LR", "fast"], ["SOLVER.BASE_LR", "'fast'", "float"]),
        (["SOLVER.IMS_PER_BATCH", "2"], ["SOLVER.IMS_PER_BATCH", "2", "8", "SOLVER.REFERENCE_WORLD_SIZE 0"]),
        (["MODEL.DEVICE", "gpu"], ["MODEL.DEVICE", "'gpu'", '"cuda"']),
        (["MODEL.DEVICE", "None"], ["MODEL.DEVICE is None", "str"]),
        (["MODEL.NONLOCAL.SCALE", "None"], ["MODEL.NONLOCAL.SCALE is None", "bool", "True"]),
        (["MODEL.NONLOCAL.RES4", "None"], ["MODEL.NONLOCAL.RES4 is None", "list", "[-1]"]),
        (["SOLVER.IMS_PER_BATCH", "None"], ["SOLVER.IMS_PER_BATCH is None", "int", "16"]),
        (["SOLVER.EARLY_STOP_PATIENCE", "-1"], ["SOLVER.EARLY_STOP_PATIENCE is -1", "0"]),
        (
            ["SOLVER.EARLY_STOP_PATIENCE", "2", "TEST.EVAL_PERIOD", "0"],
            ["SOLVER.EARLY_STOP_PATIENCE is 2", "TEST.EVAL_PERIOD 0"],
        ),
        (
            ["SOLVER.EARLY_STOP_PATIENCE", "2", "DATASETS.TEST", "()"],
            ["SOLVER.EARLY_STOP_PATIENCE is 2", "DATASETS.TEST is ()"],
        ),
        (["TEST.VAL_LOSS", "True", "DATASETS.TEST", "()"], ["TEST.VAL_LOSS is True", "DATASETS.TEST is ()"]),
        (["MODEL.RESNETS.DEPTH", "49"], ["MODEL.RESNETS.DEPTH is 49", "50"]),
        (["MODEL.RESNETS.NORM", "Foo"], ["MODEL.RESNETS.NORM is 'Foo'", "'BN'"]),
        (["DATASETS.REGISTER", '[["a", "b.json", "c"]]'], ["DATASETS.REGISTER", "b.json"]),
    ],
)
def test_wrong_override_is_one_line(opts, parts):
    message = error_of(NL, opts)
    for part in parts:
        assert part in message


def test_wrong_keypoint_head_is_one_line():
    assert "8 convs" in error_of(KEYPOINTS, ["MODEL.NONLOCAL.KEYPOINT_HEAD", "9"])
    assert "no block would be inserted" in error_of(KEYPOINTS, ["MODEL.NONLOCAL.KEYPOINT_HEAD", "0"])
    assert "KEYPOINT_HEAD is -2" in error_of(KEYPOINTS, ["MODEL.NONLOCAL.KEYPOINT_HEAD", "-2"])


@pytest.mark.parametrize(("config_file", "what"), [(KEYPOINTS, "keypoints"), (RETINANET, "RetinaNet")])
def test_augmentation_where_detectron2_has_none(config_file, what):
    message = error_of(config_file, ["TEST.AUG.ENABLED", "True"])
    assert "TEST.AUG.ENABLED is True" in message
    assert what in message
    get_config(NL, ["TEST.AUG.ENABLED", "True"])


def test_home_is_meant_by_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = get_config(NL, ["MODEL.WEIGHTS", "~/model.pth", "OUTPUT_DIR", "~/run"])
    assert [f"{tmp_path}/model.pth", f"{tmp_path}/run"] == [cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR]


def test_missing_file_names_the_nearest():
    message = error_of("mask_rcnn_R_50_FPN_1x_nl.yaml")
    assert f"did you mean {NL}?" in message
    assert "no config file" in error_of("")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("MODEL: [1\n", ["line 2", "not valid YAML"]),
        ("A: 1\nMODEL: !!python/object/apply:os.system ['true']\n", ["line 2", "!!python", "plain value"]),
        ("MODEL:\n  NONLOCAL:\n    RES9: [1]\n", ["no such key: MODEL.NONLOCAL.RES9", "did you mean"]),
        ("MODEL:\n  NONLOCAL:\n    RES4: last\n", ["MODEL.NONLOCAL.RES4", "list", "[-1]"]),
        ("_BASE_: absent.yaml\n", ["absent.yaml", "_BASE_"]),
        ("_BASE_: own.yaml\n", ["its own _BASE_"]),
        ("MODEL.NONLOCAL.RES4: [2]\n", ["MODEL.NONLOCAL.RES4", "one word", "indented"]),
        ("MODEL:\n  NONLOCAL:\n    RES4: -1\n", ["MODEL.NONLOCAL.RES4", "(-1)", "list", "[-1]"]),
        ("- 1\n", ["KEY: value"]),
        ("", ["KEY: value"]),
        ("MODEL: 3\nVERSION: 2\n", ["group of keys"]),
        ("VERSION: 99\n", ["v99"]),
    ],
)
def test_wrong_file_is_one_line(tmp_path, text, parts):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    message = error_of(path)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_config_cannot_run_code(tmp_path):
    mark = tmp_path / "ran"
    base = tmp_path / "base.yaml"
    base.write_text(f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{mark}']\n")
    own = tmp_path / "own.yaml"
    own.write_text("_BASE_: base.yaml\n")
    assert re.search(r"base\.yaml, line 1.*refused", error_of(own))
    assert not mark.exists()
