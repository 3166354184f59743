"""The config files: equal to Detectron2's where they should be, and different only where they say so."""

import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from nonlocal_det import get_config
from nonlocal_det.config.loading import CONFIG_ROOT
from nonlocal_det.layers import NonLocalBlock

MASK = "COCO-InstanceSegmentation/mask_rcnn"
ABLATION = "Ablations/mask_rcnn_R_50_FPN_1x"

#: What our files set on purpose, or this project adds, against Detectron2's own.
ON_PURPOSE = {"SOLVER.REFERENCE_WORLD_SIZE", "TEST.EVAL_PERIOD", "OUTPUT_DIR", "MODEL.DEVICE"}

ZOO = [
    f"{MASK}_R_50_FPN_1x",
    f"{MASK}_R_50_FPN_3x",
    f"{MASK}_R_101_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x",
]
ZOO_ELSEWHERE = {
    "Ablations/retinanet_R_50_FPN_1x": "COCO-Detection/retinanet_R_50_FPN_1x",
    "Ablations/mask_rcnn_R_50_C4_1x": "COCO-InstanceSegmentation/mask_rcnn_R_50_C4_1x",
}

BACKBONE = {"MODEL.BACKBONE.NAME": "build_nonlocal_backbone"}
RES4 = {**BACKBONE, "MODEL.NONLOCAL.RES4": [-1]}
HEAD = {"MODEL.ROI_KEYPOINT_HEAD.NAME": "NonLocalKeypointHead", "MODEL.NONLOCAL.KEYPOINT_HEAD": 2}
HEAD_BLOCKS = {f"roi_heads.keypoint_head.non_local_{i}": 512 for i in (2, 4, 6, 8)}
R50 = {"backbone.bottom_up.res4.non_local_5": 1024}
R101 = {"backbone.bottom_up.res4.non_local_22": 1024}


def in_stages(res3, res4):
    blocks = {f"backbone.bottom_up.res3.non_local_{i}": 512 for i in res3}
    return blocks | {f"backbone.bottom_up.res4.non_local_{i}": 1024 for i in res4}


def option(key, value):
    return (
        f"{MASK}_R_50_FPN_1x",
        {**RES4, **({f"MODEL.NONLOCAL.{key}": value} if value is not None else {})},
        R50,
    )


#: name -> (baseline, the keys that differ from it, names and channels of the blocks)
NONLOCAL = {
    f"{MASK}_R_50_FPN_1x_nl": (f"{MASK}_R_50_FPN_1x", RES4, R50),
    f"{MASK}_R_50_FPN_3x_nl": (f"{MASK}_R_50_FPN_3x", RES4, R50),
    f"{MASK}_R_101_FPN_1x_nl": (f"{MASK}_R_101_FPN_1x", RES4, R101),
    f"{MASK}_R_101_FPN_3x_nl": (f"{MASK}_R_101_FPN_3x", RES4, R101),
    f"{MASK}_X_152_32x8d_FPN_1x_nl": (
        f"{MASK}_X_152_32x8d_FPN_1x",
        RES4,
        {"backbone.bottom_up.res4.non_local_35": 1024},
    ),
    "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head": (
        "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x",
        HEAD,
        HEAD_BLOCKS,
    ),
    "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone": (
        "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x",
        {**HEAD, **RES4},
        HEAD_BLOCKS | R101,
    ),
    f"{ABLATION}_nl_embedded_gaussian": option("PAIRWISE", None),  # the default
    f"{ABLATION}_nl_gaussian": option("PAIRWISE", "gaussian"),
    f"{ABLATION}_nl_dot_product": option("PAIRWISE", "dot_product"),
    f"{ABLATION}_nl_concatenation": option("PAIRWISE", "concatenation"),
    f"{ABLATION}_nl_BN": option("NORM", "BN"),
    f"{ABLATION}_nl_SyncBN": option("NORM", "SyncBN"),
    f"{ABLATION}_nl_GN": option("NORM", "GN"),
    f"{ABLATION}_nl_res2": (
        f"{ABLATION}_freeze1",
        {**BACKBONE, "MODEL.NONLOCAL.RES2": [-1]},
        {"backbone.bottom_up.res2.non_local_2": 256},
    ),
    f"{ABLATION}_nl_res3": (
        f"{MASK}_R_50_FPN_1x",
        {**BACKBONE, "MODEL.NONLOCAL.RES3": [-1]},
        {"backbone.bottom_up.res3.non_local_3": 512},
    ),
    f"{ABLATION}_nl_res4": (f"{MASK}_R_50_FPN_1x", RES4, R50),
    f"{ABLATION}_nl_res5": (
        f"{MASK}_R_50_FPN_1x",
        {**BACKBONE, "MODEL.NONLOCAL.RES5": [-1]},
        {"backbone.bottom_up.res5.non_local_2": 2048},
    ),
    f"{ABLATION}_nl_5blocks": (
        f"{MASK}_R_50_FPN_1x",
        {**BACKBONE, "MODEL.NONLOCAL.RES3": [2, 4], "MODEL.NONLOCAL.RES4": [2, 4, 6]},
        in_stages([2, 4], [2, 4, 6]),
    ),
    f"{ABLATION}_nl_10blocks": (
        f"{MASK}_R_50_FPN_1x",
        {**BACKBONE, "MODEL.NONLOCAL.RES3": [1, 2, 3, 4], "MODEL.NONLOCAL.RES4": [1, 2, 3, 4, 5, 6]},
        in_stages([1, 2, 3, 4], [1, 2, 3, 4, 5, 6]),
    ),
    "Ablations/mask_rcnn_R_101_FPN_1x_nl_5blocks": (
        f"{MASK}_R_101_FPN_1x",
        {**BACKBONE, "MODEL.NONLOCAL.RES3": [2, 4], "MODEL.NONLOCAL.RES4": [7, 14, 21]},
        in_stages([2, 4], [7, 14, 21]),
    ),
    "Ablations/retinanet_R_50_FPN_1x_nl": (
        "Ablations/retinanet_R_50_FPN_1x",
        {**RES4, "MODEL.NONLOCAL.BACKBONE": "build_retinanet_resnet_fpn_backbone"},
        R50,
    ),
    "Ablations/mask_rcnn_R_50_C4_1x_nl": (
        "Ablations/mask_rcnn_R_50_C4_1x",
        {**RES4, "MODEL.NONLOCAL.BACKBONE": "build_resnet_backbone"},
        {"backbone.res4.non_local_5": 1024},
    ),
    "Ablations/mask_rcnn_R_50_FPN_3x_nl_finetune": (
        f"{MASK}_R_50_FPN_3x",
        {
            **RES4,
            "MODEL.WEIGHTS": "detectron2://COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x/137849600/model_final_f10217.pkl",
            "SOLVER.BASE_LR": 0.005,
            "SOLVER.STEPS": (4000,),
            "SOLVER.MAX_ITER": 5000,
            "TEST.EVAL_PERIOD": 1000,
        },
        R50,
    ),
}
#: Baselines that are in no model zoo: what they differ in from one that is.
BASELINES = {
    f"{MASK}_R_101_FPN_1x": (
        f"{MASK}_R_50_FPN_1x",
        {"MODEL.RESNETS.DEPTH": 101, "MODEL.WEIGHTS": "detectron2://ImageNetPretrained/MSRA/R-101.pkl"},
    ),
    f"{MASK}_X_152_32x8d_FPN_1x": (
        f"{MASK}_R_50_FPN_1x",
        {
            "MODEL.WEIGHTS": "catalog://ImageNetPretrained/FAIR/X-152-32x8d-IN5k",
            "MODEL.RESNETS.DEPTH": 152,
            "MODEL.RESNETS.NUM_GROUPS": 32,
            "MODEL.RESNETS.WIDTH_PER_GROUP": 8,
            "MODEL.RESNETS.STRIDE_IN_1X1": False,
        },
    ),
    f"{ABLATION}_freeze1": (f"{MASK}_R_50_FPN_1x", {"MODEL.BACKBONE.FREEZE_AT": 1}),
}


def flat(node, prefix=""):
    keys = {}
    for key, value in node.items():
        if isinstance(value, CfgNode):
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def difference(name, other):
    one, two = flat(get_config(f"{name}.yaml")), flat(get_config(f"{other}.yaml"))
    return {key: value for key, value in one.items() if value != two[key]}


@pytest.mark.parametrize(("ours", "theirs"), [*((name, name) for name in ZOO), *ZOO_ELSEWHERE.items()])
def test_baseline_equals_the_model_zoos(ours, theirs):
    found, expected = flat(get_config(f"{ours}.yaml")), flat(model_zoo.get_config(f"{theirs}.yaml"))
    differing = {key for key in expected if found[key] != expected[key]}
    assert differing <= ON_PURPOSE
    assert {key for key in found if key not in expected} == {
        "DATASETS.REGISTER",
        "DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT",
        "SOLVER.SKIP_NONFINITE_STEPS",
        "SOLVER.EARLY_STOP_PATIENCE",
        "DATALOADER.MAX_BAD_FRACTION",
        "TEST.VAL_LOSS",
        *(key for key in found if key.startswith("MODEL.NONLOCAL.")),
    }


@pytest.mark.parametrize("name", NONLOCAL)
def test_differs_from_its_baseline_in_the_named_keys_alone(name):
    baseline, keys, _ = NONLOCAL[name]
    assert difference(name, baseline) == keys


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_of_our_own(name):
    other, keys = BASELINES[name]
    assert difference(name, other) == keys


def test_finetuning_starts_from_the_zoos_weights():
    url = model_zoo.get_checkpoint_url("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml")
    weights = get_config("Ablations/mask_rcnn_R_50_FPN_3x_nl_finetune.yaml").MODEL.WEIGHTS
    assert url.endswith(weights.removeprefix("detectron2://"))


def parameters_of(block, channels):
    """Parameters of one block from Fig. 2: theta, phi and g to C' = C / 2, W_z back to C, all with biases."""
    inner = channels // 2
    embeddings = 1 if block.pairwise == "gaussian" else 3
    count = embeddings * (channels * inner + inner) + inner * channels + channels
    if block.pairwise == "concatenation":
        count += 2 * inner
    if block.w_z.norm is not None:
        count += 2 * channels
    return count


def build_on_meta(name):
    with torch.device("meta"):
        return build_model(get_config(f"{name}.yaml", ["MODEL.DEVICE", "meta"]))


@pytest.mark.parametrize("name", NONLOCAL)
def test_builds_with_the_expected_blocks(name):
    baseline, _, expected = NONLOCAL[name]
    model = build_on_meta(name)
    blocks = {key: module for key, module in model.named_modules() if isinstance(module, NonLocalBlock)}
    assert {key: block.in_channels for key, block in blocks.items()} == expected
    added = sum(parameters_of(block, expected[key]) for key, block in blocks.items())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count - sum(parameter.numel() for parameter in build_on_meta(baseline).parameters()) == added


def test_every_file_is_accounted_for():
    files = {
        path.relative_to(CONFIG_ROOT).with_suffix("").as_posix() for path in CONFIG_ROOT.glob("*/*.yaml")
    }
    tested = {*ZOO, *ZOO_ELSEWHERE, *NONLOCAL, *BASELINES}
    assert {name for name in files if not name.startswith("Quick/")} == tested
    for name in files:
        get_config(f"{name}.yaml")


def test_no_file_needs_unsafe_yaml():
    assert not [path for path in CONFIG_ROOT.rglob("*.yaml") if "!!" in path.read_text()]
