"""Detectron2's own checkpoints and ours, and the way back to Detectron2 and mmcv."""

import itertools
import pickle

import pytest
import torch
from detectron2.modeling import build_model
from small_model import R50, R50_NL, SMALL
from source_nets import TORCHVISION, convolve, images, non_local, normalise, outputs, random_tensor

from nonlocal_det import get_config
from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.errors import CheckpointError
from nonlocal_det.layers import NonLocalBlock

KEYPOINTS = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
SMALL_KEYPOINTS = ["MODEL.RESNETS.DEPTH", 50, "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", (8, 8, 8, 8)]


def make(config, *opts, trained=True):
    """A small model; trained blocks do something."""
    torch.manual_seed(0)
    cfg = get_config(config, [*SMALL, *opts])
    model = build_model(cfg).eval()
    for name, value in model.state_dict().items():
        if trained and ".non_local_" in name and value.is_floating_point():
            value.copy_(random_tensor(torch.Generator().manual_seed(len(name)), *value.shape).abs() * 0.1)
    return model


def as_zoo(model, path):
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    weights |= {
        f"proposal_generator.anchor_generator.cell_anchors.{i}": torch.ones(3, 4).numpy() for i in range(5)
    }
    path.write_bytes(pickle.dumps({"model": weights, "__author__": "Detectron2 Model Zoo"}))
    return path


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_zoo_model_becomes_a_start_with_blocks(convert, tmp_path):
    baseline = make(R50)
    made = convert(as_zoo(baseline, tmp_path / "zoo.pkl"), config=R50_NL)
    same(made.tensors, baseline.state_dict())
    assert made.report.settings == {}
    new = [name for names in made.report.expected.values() for name in names]
    assert new
    assert all("res4.non_local_5" in name for name in new)
    x = images(torch.Generator().manual_seed(0), 64)[:, :, :64, :64]
    torch.testing.assert_close(
        outputs(made.model().backbone, x), outputs(baseline.backbone, x), rtol=0, atol=0
    )


def test_other_classes_are_new(convert, tmp_path):
    made = convert(as_zoo(make(R50), tmp_path / "zoo.pkl"), "MODEL.ROI_HEADS.NUM_CLASSES", 3, config=R50)
    new = [name for names in made.report.expected.values() for name in names]
    assert "roi_heads.box_predictor.cls_score.weight" in new
    assert all("predictor" in name for name in new)
    assert "shape [81, 8]" in made.report.skipped["roi_heads.box_predictor.cls_score.weight"]


@pytest.mark.parametrize("config", [R50, R50_NL])
def test_blocks_of_ours_set_the_placement(convert, config):
    opts = ["MODEL.NONLOCAL.RES3", [2, 4], "MODEL.NONLOCAL.RES4", [-1, 6], "MODEL.NONLOCAL.NORM", "GN"]
    model = make(R50_NL, *opts)
    made = convert({"model": model.state_dict(), "iteration": 3}, "MODEL.NONLOCAL.NORM", "GN", config=config)
    same(made.tensors, model.state_dict())
    node = made.cfg.MODEL.NONLOCAL
    assert (list(node.RES3), list(node.RES4), node.NORM) == ([2, 4], [5, 6], "GN")
    assert made.model().missing == []


def test_keypoint_heads_c4_and_safetensors(convert, tmp_path):
    pytest.importorskip("safetensors")
    model = make(KEYPOINTS, *SMALL_KEYPOINTS)
    made = convert(
        dict(model.state_dict()),
        *SMALL_KEYPOINTS,
        "MODEL.NONLOCAL.KEYPOINT_HEAD",
        4,
        config=KEYPOINTS,
        out="a.safetensors",
    )
    same(made.tensors, model.state_dict())
    assert made.cfg.MODEL.NONLOCAL.KEYPOINT_HEAD == 2
    again = convert(made.path, *SMALL_KEYPOINTS, config=KEYPOINTS)
    same(again.tensors, model.state_dict())
    c4 = "Ablations/mask_rcnn_R_50_C4_1x_nl.yaml"
    made = convert(TORCHVISION.random(torch.Generator().manual_seed(0)), config=c4)
    assert "roi_heads.res5.0.conv1.weight" in made.tensors
    assert "backbone.res4.0.conv1.weight" in made.tensors


def test_a_converted_file_loads_as_any_other(convert):
    made = convert(make(R50_NL).state_dict(), "MODEL.NONLOCAL.RES4", [2])
    assert str(made.path) == made.cfg.MODEL.WEIGHTS
    checkpointer = NonLocalCheckpointer(build_model(made.cfg))
    checkpointer.load(made.cfg.MODEL.WEIGHTS)
    assert len(checkpointer.report.loaded) == checkpointer.report.total


def test_the_backbone_of_detectron2s_converter_for_torchvision(convert, tmp_path):
    ours = make(R50).backbone.bottom_up.state_dict()
    weights = {name: value.numpy() for name, value in ours.items()} | {"fc.weight": torch.ones(1).numpy()}
    (tmp_path / "R-50.pkl").write_bytes(
        pickle.dumps({"model": weights, "__author__": "torchvision", "matching_heuristics": True})
    )
    made = convert(tmp_path / "R-50.pkl", config=R50)
    assert (made.cfg.INPUT.FORMAT, made.cfg.MODEL.RESNETS.STRIDE_IN_1X1) == ("RGB", False)
    same(made.tensors, {f"backbone.bottom_up.{name}": value for name, value in ours.items()})


@pytest.mark.parametrize("norm", ["", "BN", "GN"])
def test_identity_blocks_are_stripped_for_detectron2(convert, norm):
    model = make(R50_NL, "MODEL.NONLOCAL.NORM", norm, trained=False)
    made = convert(model.state_dict(), "MODEL.NONLOCAL.NORM", norm, target="detectron2")
    assert made.cfg.MODEL.BACKBONE.NAME == "build_resnet_fpn_backbone"
    baseline = made.model()
    assert baseline.missing == []
    assert not any(isinstance(module, NonLocalBlock) for module in baseline.modules())
    x = images(torch.Generator().manual_seed(0), 64)[:, :, :64, :64]
    same(outputs(baseline.backbone, x), outputs(model.backbone, x))


def test_trained_blocks_are_stripped_only_if_asked(convert):
    state = make(KEYPOINTS, *SMALL_KEYPOINTS).state_dict()
    with pytest.raises(CheckpointError, match=r"3 of 3 non-local blocks do something.*--strip-trained"):
        convert(state, *SMALL_KEYPOINTS, config=KEYPOINTS, target="detectron2")
    made = convert(state, *SMALL_KEYPOINTS, config=KEYPOINTS, target="detectron2", strip_trained=True)
    assert made.cfg.MODEL.ROI_KEYPOINT_HEAD.NAME == "KRCNNConvDeconvUpsampleHead"
    assert made.model().missing == []


FORMS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")


@pytest.mark.parametrize(
    ("form", "pool", "norm"),
    [*itertools.product(FORMS, ("embedding", "none"), ("", "BN")), ("embedded_gaussian", "none", "LN")],
)
def test_blocks_in_mmcvs_names(convert, generator, assert_same, form, pool, norm):
    channels = 64
    opts = ["MODEL.NONLOCAL.PAIRWISE", form, "MODEL.NONLOCAL.POOL", pool, "MODEL.NONLOCAL.NORM", norm]
    opts += ["MODEL.NONLOCAL.SCALE", form != "gaussian"]
    model = make(R50_NL, *opts)
    block = model.backbone.bottom_up.res4.non_local_5
    with torch.no_grad():
        if norm == "LN":
            block.w_z.bias.zero_()
        for module in (block.theta, block.phi, block.g):
            if module is not None:
                module.weight.sub_(0.08)
    made = convert(model.state_dict(), *opts, target="mmcv")
    prefix = "backbone.bottom_up.res4.non_local_5."
    assert all(name.startswith(prefix) for name in made.tensors)
    found = {name.removeprefix(prefix): value for name, value in made.tensors.items()}
    end = ".0.conv" if pool == "embedding" else ".conv"

    def conv(name):
        return lambda x: convolve(x, found[f"{name}.weight"], bias=found.get(f"{name}.bias"))

    def out(y):
        y = conv("conv_out.conv")(y)
        if norm == "BN":
            leaves = ("weight", "bias", "running_mean", "running_var")
            return normalise(y, *(found[f"conv_out.bn.{leaf}"] for leaf in leaves))
        if norm == "LN":
            return torch.nn.functional.group_norm(
                y, 1, found["conv_out.gn.weight"], found["conv_out.gn.bias"]
            )
        return y

    x = random_tensor(generator, 2, channels, 7, 6)
    project = found.get("concat_project.conv.weight")
    options = {"form": form, "pool": pool, "scale": form == "embedded_gaussian", "project": project}
    with torch.no_grad():
        theirs = non_local(x, conv("theta.conv"), conv(f"phi{end}"), conv(f"g{end}"), out, **options)
        assert_same(block(x), theirs)
    if norm:
        assert "conv_out.conv.bias" not in found
    (call,) = (note for note in made.report.notes if "NonLocal2d(" in note)
    assert f"NonLocal2d({channels}, reduction=2" in call
    assert f"mode={form!r}" in call
    if (pool, norm) != ("embedding", "BN"):
        return
    # And back: the names are those of mmcv.
    back = convert(found, *opts)
    with torch.no_grad():
        assert_same(back.block("res4.non_local_5")(x), theirs)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (("MODEL.NONLOCAL.POOL", "input"), "cannot pool the input"),
        (
            ("MODEL.NONLOCAL.POOL", "none", "MODEL.NONLOCAL.PAIRWISE", "gaussian"),
            "does not scale the gaussian form",
        ),
        (("MODEL.NONLOCAL.POOL", "none", "MODEL.NONLOCAL.NORM", "GN"), "no bias before a group norm"),
    ],
)
def test_what_mmcv_cannot_compute_is_refused(convert, opts, message):
    with pytest.raises(CheckpointError, match=message):
        convert(make(R50_NL, *opts).state_dict(), *opts, target="mmcv")


def test_mmcv_needs_a_block(convert, tmp_path):
    with pytest.raises(CheckpointError, match="no non-local block"):
        convert(make(R50).state_dict(), config=R50, target="mmcv")
    assert not (tmp_path / "out.pth").exists()
