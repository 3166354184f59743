"""The wrapper: where blocks land, under which names, frozen or not, and what whole detectors do with them."""

import logging

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from detectron2.modeling.backbone import Backbone
from detectron2.utils.events import EventStorage

from nonlocal_det import ConfigError, add_nonlocal_config
from nonlocal_det.layers import NonLocalBlock

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x"
C4 = "Ablations/mask_rcnn_R_50_C4_1x"
RETINANET = "Ablations/retinanet_R_50_FPN_1x"
KEYPOINTS = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x"
PAIRS = [
    (f"{MASK}_nl.yaml", f"{MASK}.yaml"),
    (f"{C4}_nl.yaml", f"{C4}.yaml"),
    (f"{RETINANET}_nl.yaml", f"{RETINANET}.yaml"),
    (f"{KEYPOINTS}_nl_head.yaml", f"{KEYPOINTS}.yaml"),
    (f"{KEYPOINTS}_nl_head_backbone.yaml", f"{KEYPOINTS}.yaml"),
]


def stages_of(backbone):
    bottom_up = getattr(backbone, "bottom_up", backbone)
    return {name: list(dict(getattr(bottom_up, name).named_children())) for name in bottom_up.stage_names}


def test_blocks_at_any_place_of_several_stages(small_config, caplog):
    places = ["MODEL.NONLOCAL.RES3", [-4, 4, 1], "MODEL.NONLOCAL.RES4", [-1], "MODEL.NONLOCAL.RES5", [0, 3]]
    with caplog.at_level(logging.INFO):
        backbone = build_backbone(small_config(f"{MASK}_nl.yaml", *places))
    assert stages_of(backbone) == {
        "res2": ["0", "1", "2"],
        "res3": ["non_local_0", "0", "non_local_1", "1", "2", "3", "non_local_4"],
        "res4": ["0", "1", "2", "3", "4", "non_local_5", "5"],
        "res5": ["non_local_0", "0", "1", "2", "non_local_3"],
    }
    # channels of the place: a block before residual block 0 reads what the stage before made
    stage = backbone.bottom_up.res5
    assert (stage.non_local_0.in_channels, stage.non_local_3.in_channels) == (64, 128)
    for name in ("res3.non_local_0", "res4.non_local_5", "res5.non_local_3"):
        assert name in caplog.text
    # C' = C / 2: theta, phi, g of C x C' + C' and W_z of C' x C + C
    assert f"{sum(2 * c * c + c + 3 * c // 2 for c in (16, 32, 32, 64, 64, 128)):,}" in caplog.text


def test_names_of_everything_else_stay(small_config):
    baseline = build_backbone(small_config(f"{MASK}.yaml"))
    wrapped = build_backbone(small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.RES3", [0, 4]))
    added = set(wrapped.state_dict()) - set(baseline.state_dict())
    assert set(baseline.state_dict()) <= set(wrapped.state_dict())
    assert added == {
        f"bottom_up.{block}.{layer}.{kind}"
        for block in ("res3.non_local_0", "res3.non_local_4", "res4.non_local_5")
        for layer in ("theta", "phi", "g", "w_z")
        for kind in ("weight", "bias")
    }


def test_blocks_are_run_in_their_place(small_config):
    backbone = build_backbone(small_config(f"{MASK}_nl.yaml")).eval()
    order = []
    for name, module in backbone.bottom_up.res4.named_children():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    with torch.no_grad():
        backbone(torch.rand(1, 3, 64, 64))
    assert order == ["0", "1", "2", "3", "4", "non_local_5", "5"]


@pytest.mark.parametrize(
    ("stage", "places", "parts"),
    [
        ("RES4", [7], ["MODEL.NONLOCAL.RES4", "[7]", "6 blocks", "-6 to 6"]),
        ("RES4", [-7], ["MODEL.NONLOCAL.RES4", "[-7]", "-6 to 6"]),
        ("RES4", [5, -1], ["MODEL.NONLOCAL.RES4", "[5, -1]", "twice"]),
        ("RES3", [2, 2], ["MODEL.NONLOCAL.RES3", "[2, 2]", "twice"]),
    ],
)
def test_wrong_place_is_one_line(small_config, stage, places, parts):
    cfg = small_config(f"{MASK}_nl.yaml", f"MODEL.NONLOCAL.{stage}", places)
    with pytest.raises(ConfigError) as caught:
        build_backbone(cfg)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_res5_of_c4_is_refused(small_config):
    cfg = small_config(f"{C4}_nl.yaml", "MODEL.NONLOCAL.RES5", [-1])
    with pytest.raises(
        ConfigError, match=r"MODEL\.NONLOCAL\.RES5 is \[-1\].*RoI heads.*MODEL\.NONLOCAL\.RES4 \[-1\]"
    ):
        build_backbone(cfg)


def test_retinanet_needs_p6_and_p7(small_config):
    cfg = small_config(f"{RETINANET}_nl.yaml", "MODEL.NONLOCAL.BACKBONE", "build_resnet_fpn_backbone")
    with pytest.raises(ConfigError, match=r"BACKBONE.*reads p7.*build_retinanet_resnet_fpn_backbone"):
        build_backbone(cfg)


def test_a_backbone_without_a_resnet_is_refused(small_config):
    class Plain(Backbone):
        def forward(self, x):
            return {"plain": x}

    if "build_plain_backbone" not in BACKBONE_REGISTRY:
        BACKBONE_REGISTRY._do_register("build_plain_backbone", lambda cfg, shape: Plain())
    cfg = small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.BACKBONE", "build_plain_backbone")
    with pytest.raises(ConfigError, match=r"build_plain_backbone.*no ResNet.*build_resnet_fpn_backbone"):
        build_backbone(cfg)


def test_without_our_keys_the_way_out_is_named():
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_nonlocal_backbone"
    with pytest.raises(ConfigError, match=r"add_nonlocal_config\(cfg\)"):
        build_backbone(cfg)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BLOCK": "foo"}, "BLOCK is 'foo': not known"),
        ({"BLOCK": "residual", "PAIRWISE": "gaussian"}, "PAIRWISE is 'gaussian': would be ignored"),
        ({"RES4": [True]}, "RES4 is .*whole numbers"),
        ({"RES4": ["a"]}, "RES4 is .*whole numbers"),
        ({"BACKBONE": "build_nonlocal_backbone"}, "BACKBONE is .*cannot wrap itself"),
        ({"BACKBONE": "foo"}, "BACKBONE is 'foo': not registered"),
        ({"REDUCTION": 0}, "REDUCTION is 0: must be 1 or more"),
        ({"NORM": "FrozenBN"}, "NORM is 'FrozenBN': .*dead for ever"),
    ],
)
def test_wrong_options_of_hand_made_configs(changes, message):
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_nonlocal_backbone"
    cfg.MODEL.NONLOCAL.RES4 = [-1]
    for key, value in changes.items():
        cfg.MODEL.NONLOCAL[key] = value
    with pytest.raises(ConfigError, match=message):
        build_backbone(cfg)


def test_nothing_asked_for_is_an_error_for_hand_made_configs_too():
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_nonlocal_backbone"
    with pytest.raises(ConfigError, match="no block would be inserted"):
        build_backbone(cfg)


@pytest.mark.parametrize("norm", ["", "BN", "GN", "LN", "naiveSyncBN"])
def test_frozen_stages_freeze_their_blocks(small_config, norm):
    opts = ["MODEL.BACKBONE.FREEZE_AT", 3, "MODEL.NONLOCAL.NORM", norm, "MODEL.NONLOCAL.RES2", [1]]
    backbone = build_backbone(small_config(f"{MASK}_nl.yaml", *opts, "MODEL.NONLOCAL.RES3", [4]))
    bottom_up = backbone.bottom_up
    for block in (bottom_up.res2.non_local_1, bottom_up.res3.non_local_4):
        assert not any(parameter.requires_grad for parameter in block.parameters())
        if norm in ("BN", "naiveSyncBN"):
            assert isinstance(block.w_z.norm, FrozenBatchNorm2d)
    assert all(parameter.requires_grad for parameter in bottom_up.res4.non_local_5.parameters())


def test_freezing_later_reaches_the_block(small_config):
    bottom_up = build_backbone(small_config(f"{MASK}_nl.yaml")).bottom_up
    bottom_up.freeze(4)
    assert not any(parameter.requires_grad for parameter in bottom_up.res4.non_local_5.parameters())


def test_normal_init_without_norm_is_warned_of(small_config, caplog):
    build_backbone(small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.INIT", "normal"))
    assert "may learn slowly" in caplog.text
    caplog.clear()
    build_backbone(
        small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.INIT", "normal", "MODEL.NONLOCAL.NORM", "BN")
    )
    assert "may learn slowly" not in caplog.text


def test_options_reach_the_block(small_config):
    opts = {"PAIRWISE": "concatenation", "POOL": "none", "SCALE": False, "NORM": "GN", "REDUCTION": 4}
    flat = [item for key, value in opts.items() for item in (f"MODEL.NONLOCAL.{key}", value)]
    block = build_backbone(small_config(f"{MASK}_nl.yaml", *flat)).bottom_up.res4.non_local_5
    assert isinstance(block, NonLocalBlock)
    assert (block.pairwise, block.pool, block.scale, block.inter_channels) == (
        "concatenation",
        "none",
        False,
        16,
    )
    assert isinstance(block.w_z.norm, torch.nn.GroupNorm)


def losses_of(model, batch):
    torch.manual_seed(3)  # proposals and RoIs are sampled at random
    with EventStorage():
        return model(batch)


@pytest.mark.parametrize(("nonlocal_file", "baseline_file"), PAIRS)
@pytest.mark.parametrize("norm", ["", "BN"])
def test_identity_at_the_start(small_config, batch, nonlocal_file, baseline_file, norm):
    torch.manual_seed(0)
    baseline = build_model(small_config(baseline_file))
    model = build_model(small_config(nonlocal_file, "MODEL.NONLOCAL.NORM", norm))
    missing = model.load_state_dict(baseline.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all("non_local_" in key for key in missing.missing_keys)

    expected, found = losses_of(baseline, batch), losses_of(model, batch)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)

    baseline.eval(), model.eval()
    with torch.no_grad():
        for before, after in zip(baseline(batch), model(batch), strict=True):
            before, after = before["instances"].get_fields(), after["instances"].get_fields()
            assert before.keys() == after.keys()
            for name in before:
                one, two = (getattr(fields[name], "tensor", fields[name]) for fields in (before, after))
                torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize("nonlocal_file", [pair[0] for pair in PAIRS])
@pytest.mark.parametrize("norm", ["", "BN"])
def test_every_parameter_of_the_blocks_learns(small_config, batch, nonlocal_file, norm):
    torch.manual_seed(0)
    model = build_model(small_config(nonlocal_file, "MODEL.NONLOCAL.NORM", norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        sum(losses_of(model, batch).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        gradients = {
            name: p.grad.abs().max().item() for name, p in model.named_parameters() if "non_local_" in name
        }
        optimizer.step()
    # Zero by algebra: a bias of phi adds the same to every logit of a row; a batch norm takes away the mean,
    # and with it the biases of W_z and g.
    zero = ("phi.bias", "w_z.bias", "g.bias") if norm == "BN" else ("phi.bias",)
    assert len(gradients) >= 8
    largest = max(gradients.values())
    for name, value in gradients.items():
        if name.endswith(zero):
            assert value < 1e-4 * largest, name
        else:
            assert value > 0, name


def test_two_block_stage_trains(small_config, batch):
    model = build_model(small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.RES4", [2, -1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        sum(losses_of(model, batch).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    for block in (model.backbone.bottom_up.res4.non_local_2, model.backbone.bottom_up.res4.non_local_5):
        assert block.theta.weight.grad.abs().max() > 0
        assert block.w_z.weight.grad.abs().max() > 0


class Outputs(torch.nn.Module):
    """The backbone with a list for its output, which tracing asks for."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return list(self.backbone(x).values())


@pytest.mark.parametrize("pairwise", ["embedded_gaussian", "gaussian", "dot_product", "concatenation"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_of_the_wrapped_backbone(small_config, pairwise, how):
    import detectron2.export.torchscript  # noqa: F401  (without its patches even the stock FPN does not script)

    torch.manual_seed(0)
    # In double precision: an exported graph may sum in another order, and nothing here is trained to keep
    # activations small.
    backbone = (
        build_backbone(small_config(f"{MASK}_nl.yaml", "MODEL.NONLOCAL.PAIRWISE", pairwise)).eval().double()
    )
    torch.nn.init.normal_(backbone.bottom_up.res4.non_local_5.w_z.weight, std=0.1)
    image, other = torch.rand(1, 3, 64, 96).double(), torch.rand(2, 3, 96, 64).double()
    with torch.no_grad():
        if how == "script":
            scripted = torch.jit.script(backbone)
            exported = lambda x: list(scripted(x).values())  # noqa: E731
        else:
            exported = torch.jit.trace(Outputs(backbone), image)
        for x in (image, other):
            for found, expected in zip(exported(x), backbone(x).values(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("builder", ["build_resnet_backbone", "build_resnet_fpn_backbone"])
def test_built_directly_with_a_shape(builder):
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_nonlocal_backbone"
    cfg.MODEL.NONLOCAL.BACKBONE = builder
    cfg.MODEL.NONLOCAL.RES4 = [-1]
    if builder == "build_resnet_fpn_backbone":
        cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    with torch.device("meta"):
        backbone = build_backbone(cfg, ShapeSpec(channels=3))
    assert stages_of(backbone)["res4"][-2:] == ["non_local_5", "5"]
