"""Ordinary residual blocks in the place of non-local ones, for comparison."""

import pytest
import torch
from detectron2.modeling import build_backbone, build_model
from detectron2.modeling.backbone.resnet import BasicBlock, BottleneckBlock
from detectron2.utils.events import EventStorage

from nonlocal_det import ConfigError
from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x"
RESIDUAL = ["MODEL.NONLOCAL.BLOCK", "residual"]
R18 = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]


def losses_of(model, batch):
    torch.manual_seed(3)
    with EventStorage():
        return model(batch)


@pytest.mark.parametrize(
    ("opts", "kind", "last", "place"),
    [([], BottleneckBlock, "conv3", 5), (R18, BasicBlock, "conv2", 1)],
    ids=["R50", "R18"],
)
@pytest.mark.parametrize("norm", ["", "BN", "naiveSyncBN"])
def test_identity_at_the_start_in_the_right_place(small_config, batch, opts, kind, last, place, norm):
    torch.manual_seed(0)
    baseline = build_model(small_config(f"{MASK}.yaml", *opts))
    model = build_model(small_config(f"{MASK}_nl.yaml", *opts, *RESIDUAL, "MODEL.NONLOCAL.NORM", norm))
    missing = model.load_state_dict(baseline.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(f"res4.residual_{place}." in key for key in missing.missing_keys)

    stage = model.backbone.bottom_up.res4
    names = [name for name, _ in stage.named_children()]
    assert names.index(f"residual_{place}") == place
    assert names.index(str(place)) == place + 1
    block = stage.get_submodule(f"residual_{place}")
    assert type(block) is kind
    assert block.stride == 1
    assert block.shortcut is None
    zero = getattr(block, last)
    assert not (zero.norm.weight if norm else zero.weight).any()

    expected, found = losses_of(baseline, batch), losses_of(model, batch)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_parameters_are_those_of_a_stock_block(small_config):
    """Fig. 5 of He et al. 2016: 1x1, 3x3, 1x1 without biases, each with a batch norm."""
    opts = [*RESIDUAL, "MODEL.NONLOCAL.NORM", "BN"]
    block = build_backbone(small_config(f"{MASK}_nl.yaml", *opts)).bottom_up.res4.residual_5
    channels, inner = 64, 32  # the small net: 16 * 4 in res4, and 8 * 4 inside
    count = channels * inner + 9 * inner * inner + inner * channels + 2 * (inner + inner + channels)
    assert sum(parameter.numel() for parameter in block.parameters()) == count


def test_groups_and_the_first_place_of_a_stage(small_config):
    opts = [*RESIDUAL, "MODEL.NONLOCAL.RES4", [0], "MODEL.RESNETS.NUM_GROUPS", 4]
    block = build_backbone(small_config(f"{MASK}_nl.yaml", *opts)).bottom_up.res4.residual_0
    # Before the first block of res4 there are res3's 32 channels, half of res4's; so half the inner ones.
    assert (block.in_channels, block.out_channels) == (32, 32)
    assert block.conv2.groups == 4
    assert block.conv1.out_channels == 8 * 4 * 4 // 2


@pytest.mark.parametrize("norm", ["", "BN"])
def test_every_parameter_learns(small_config, batch, norm):
    torch.manual_seed(0)
    model = build_model(small_config(f"{MASK}_nl.yaml", *RESIDUAL, "MODEL.NONLOCAL.NORM", norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        sum(losses_of(model, batch).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        gradients = {n: p.grad.abs().max() for n, p in model.named_parameters() if "residual_" in n}
        optimizer.step()
    assert len(gradients) == (9 if norm else 3)
    assert all(gradient > 0 for gradient in gradients.values())


@pytest.mark.parametrize(
    ("opts", "parts"),
    [
        (["MODEL.NONLOCAL.BLOCK", "bottleneck"], ["MODEL.NONLOCAL.BLOCK", "bottleneck", '"residual"']),
        ([*RESIDUAL, "MODEL.NONLOCAL.PAIRWISE", "gaussian"], ["MODEL.NONLOCAL.PAIRWISE", "would be ignored"]),
        ([*RESIDUAL, "MODEL.NONLOCAL.POOL", "none"], ["MODEL.NONLOCAL.POOL", "would be ignored"]),
        ([*RESIDUAL, "MODEL.NONLOCAL.REDUCTION", 4], ["MODEL.NONLOCAL.REDUCTION", "would be ignored"]),
    ],
)
def test_what_makes_no_sense_is_one_line(small_config, opts, parts):
    with pytest.raises(ConfigError) as error:
        small_config(f"{MASK}_nl.yaml", *opts)
    assert all(part in str(error.value) for part in parts)
    assert "\n" not in str(error.value)


def test_refused_in_the_keypoint_head(small_config):
    with pytest.raises(ConfigError, match="the keypoint head has no residual blocks"):
        small_config("COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml", *RESIDUAL)


def test_a_baseline_loads_and_a_trained_block_is_not_dropped(small_config, tmp_path):
    baseline = build_model(small_config(f"{MASK}.yaml"))
    model = build_model(small_config(f"{MASK}_nl.yaml", *RESIDUAL, "MODEL.NONLOCAL.NORM", "BN"))
    NonLocalCheckpointer(baseline, str(tmp_path)).save("baseline")
    NonLocalCheckpointer(model, str(tmp_path)).save("residual")
    checkpointer = NonLocalCheckpointer(model)
    checkpointer.load(str(tmp_path / "baseline.pth"))
    assert checkpointer.fresh_blocks == ["backbone.bottom_up.res4.residual_5"]
    with pytest.raises(ValueError, match=r"MODEL.NONLOCAL.RES4 \[5\], MODEL.NONLOCAL.BLOCK residual"):
        NonLocalCheckpointer(baseline).load(str(tmp_path / "residual.pth"))


def test_a_pyramid_that_ends_with_res4(small_config):
    config = small_config("Quick/faster_rcnn_R_18_FPN_context.yaml", *R18, "MODEL.RESNETS.DEPTH", 18)
    backbone = build_backbone(config).eval()
    maps = backbone(torch.rand(1, 3, 96, 96))
    assert {name: tuple(value.shape[2:]) for name, value in maps.items()} == {
        "p2": (24, 24),
        "p3": (12, 12),
        "p4": (6, 6),
        "p5": (3, 3),
    }
    torch.testing.assert_close(maps["p5"], maps["p4"][:, :, ::2, ::2])
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == {
        "p2": 4,
        "p3": 8,
        "p4": 16,
        "p5": 32,
    }
