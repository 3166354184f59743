"""Files that lack something, have too much, or say what they are only in part: right, or refused by name."""

import pickle
import re
from functools import partial

import pytest
import source_nets
import torch
from detectron2.modeling import build_model
from small_model import R50, R50_NL, SMALL
from source_nets import (
    AUTHORS,
    MMACTION2,
    MMCV,
    SLOWFAST,
    STATISTICS,
    STEM,
    TORCHVISION,
    WIDTH,
    ResNetNames,
    authors_block_name,
    caffe2,
    check,
    images,
    mmdetection,
    random_block,
    random_tensor,
)

from nonlocal_det import get_config
from nonlocal_det.errors import CheckpointError

C = 16 * WIDTH  # channels of res4
SLOWFAST_BLOCK = {"theta": "conv_theta", "phi": "conv_phi", "g": "conv_g", "out": "conv_out", "norm": "bn"}
PYTORCH_BLOCK = {"theta": "theta", "phi": "phi.0", "g": "g.0", "out": "W.0", "norm": "W.1"}
OURS = {"theta": "theta", "phi": "phi", "g": "g", "out": "w_z", "norm": "w_z.norm"}
DETECTRON2 = ResNetNames(
    stem=("stem.conv1.weight", "stem.conv1.norm.{leaf}"),
    conv=("res{stage}.{i}.conv{n}.weight", "res{stage}.{i}.conv{n}.norm.{{leaf}}"),
    shortcut=("res{stage}.{i}.shortcut.weight", "res{stage}.{i}.shortcut.norm.{{leaf}}"),
    leaves=STATISTICS,
)


def authors_net(generator):
    net = caffe2(leaves=("s", "b", "rm", "riv"), time=(1, 1)).random(generator)
    block = random_block(generator, C, AUTHORS, dims=3)
    return net | {authors_block_name(4, 5, part): value for part, value in block.items()}


def with_block(net, prefix, modules, *, dims, out_bias=True):
    def make(generator):
        block = random_block(generator, C, modules, dims=dims, out_bias=out_bias)
        return net.random(generator) | {f"{prefix}.{name}": value for name, value in block.items()}

    return make


def mmdetection_net(generator):
    block = random_block(generator, C, MMCV, dims=2, out_bias=False)
    return mmdetection(TORCHVISION.random(generator), {"layer3.5.nonlocal_block": block})["state_dict"]


# A whole net of every source, with one block behind the last of res4 but for the ImageNet backbones.
SOURCES = {
    "authors": authors_net,
    "caffe2": caffe2(leaves=("s", "b"), stride_in_1x1=True).random,
    "detectron2": with_block(DETECTRON2, "res4.non_local_6", OURS, dims=2),
    "mmaction2": with_block(MMACTION2, "backbone.layer3.5.non_local_block", MMCV, dims=3, out_bias=False),
    "mmdetection": mmdetection_net,
    "nonlocal_pytorch": with_block(TORCHVISION, "layer3.6", PYTORCH_BLOCK, dims=2),
    "slowfast": with_block(SLOWFAST, "s4.pathway0_nonlocal5", SLOWFAST_BLOCK, dims=3),
    "torchvision": TORCHVISION.random,
}


@pytest.fixture(params=SOURCES)
def source(request):
    return request.param


@pytest.fixture
def whole(source, generator):
    return SOURCES[source](generator)


def refused(convert, tensors, match, *opts, **options):
    with pytest.raises(CheckpointError, match=match) as info:
        convert(tensors, *opts, **{"config": R50, "allow_moved": True} | options)
    assert "\n" not in str(info.value)


def test_any_missing_tensor_is_named(convert, source, whole):
    """A conv, a factor, a mean and a variance of the net, and a third of the block's tensors by turns."""
    made = convert(whole, config=R50, allow_moved=True)
    assert made.report.source
    targets = {move.target: move.origin for move in made.report.moves if move.origin}
    parts = ("conv2.weight", "conv2.norm.weight", "conv2.norm.running_mean", "conv2.norm.running_var")
    block = [name for name in targets if ".non_local_" in name]
    assert len(block) == (0 if source in ("caffe2", "torchvision") else 12 - source.startswith("mm"))
    start = list(SOURCES).index(source)
    for name in [*(f"backbone.bottom_up.res3.1.{part}" for part in parts), *block[start % 3 :: 3]]:
        if name not in targets:
            assert source == "caffe2"  # its norms have no statistics
            continue
        # Without its weight g is no module of ours, and its bias is told by the file's name.
        ours = "has no weight of g" if name.endswith(".g.weight") else rf"{re.escape(name)}: not in the file"
        refused(convert, {key: value for key, value in whole.items() if key != targets[name]}, ours)


def test_a_missing_norm_is_named(convert, source, whole):
    names = {
        "authors": "res3_1_branch2b_bn",
        "caffe2": "res3_1_branch2b_bn",
        "detectron2": r"res3.1.conv2.norm",
    }
    names |= {"mmaction2": "layer2.1.conv2.bn", "slowfast": "s3.pathway0_res1.branch2.b_bn"}
    norm = names.get(source, "layer2.1.bn2")
    left = {name: value for name, value in whole.items() if norm not in name}
    assert len(whole) - len(left) in (2, 4)
    refused(convert, left, r"res3\.1\.conv2\.norm\.weight: not in the file")


@pytest.mark.parametrize(
    ("source", "norm", "match"),
    [
        ("mmaction2", "conv_out.bn", r"w_z\.bias: not in the file"),  # the conv has none before a norm
        ("mmdetection", "conv_out.bn", r"w_z\.bias: not in the file"),
        ("nonlocal_pytorch", "W.1.", r"'layer3.before6' has no W\.1, which .* has after W\.0"),
        ("slowfast", "nonlocal5.bn", "has no bn or norm, which SlowFast has after conv_out"),
    ],
)
def test_a_block_without_the_norm_that_it_should_have(convert, generator, source, norm, match):
    tensors = {name: value for name, value in SOURCES[source](generator).items() if norm not in name}
    refused(convert, tensors, match)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_numbers_that_are_none(convert, source, whole, value):
    name = next(name for name in whole if "5" in name)
    whole[name] = whole[name].double()
    whole[name].flatten()[3] = value
    refused(convert, whole, rf"{re.escape(name)} holds {'NaN' if value != value else 'infinity'}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_quantised_weights(convert, source, whole, dtype):
    name = next(name for name in whole if "5" in name)
    whole[name] = whole[name].to(dtype)
    what = str(dtype).removeprefix("torch.")
    refused(convert, whole, rf"{re.escape(name)} holds numbers of {what}, as quantised weights do")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read(convert, generator, dtype):
    whole = {name: value.to(dtype) for name, value in SOURCES["slowfast"](generator).items()}
    found = convert(whole, config=R50)
    expected = convert({name: value.float() for name, value in whole.items()}, config=R50)
    for name, value in expected.tensors.items():
        assert value.dtype in (torch.float32, torch.int64)  # int64: counters
        assert torch.equal(found.tensors[name], value)


def test_a_swapped_shape_a_tensor_too_many_and_another_depth(convert, source, whole):
    made = convert(whole, config=R50, allow_moved=True)
    name = next(move.origin for move in made.report.moves if move.target.endswith("res3.1.conv3.weight"))
    refused(convert, whole | {name: whole[name].transpose(0, 1)}, r"res3\.1\.conv3\.weight: .*in the file")
    extra = name.replace("3_1_", "3_9_") if "_branch" in name else "extra.weight"
    refused(
        convert, whole | {extra: torch.ones(2, 2)}, re.escape(extra) if extra == "extra.weight" else "res3"
    )
    refused(convert, whole, r"MODEL\.RESNETS\.DEPTH 101.*--opts .*MODEL\.RESNETS\.DEPTH 50", *DEPTH_101)


DEPTH_101 = ("MODEL.RESNETS.DEPTH", 101)


@pytest.mark.parametrize("shape", [(), (4,), (4, 0, 3, 3), (4, 4, 1, 3, 3, 1)])
@pytest.mark.parametrize(
    ("source", "name"), [("caffe2", "res2_0_branch2b_w"), ("torchvision", "layer1.0.conv2.weight")]
)
def test_shapes_that_no_conv_has(convert, generator, source, name, shape):
    tensors = SOURCES[source](generator) | {name: torch.ones(shape)}
    refused(convert, tensors, r"res2\.0\.conv2\.weight: .*in the file")


def test_a_variance_below_0(convert, generator):
    tensors = TORCHVISION.random(generator)
    swapped = tensors | {
        "bn1.running_mean": tensors["bn1.running_var"],
        "bn1.running_var": tensors["bn1.running_mean"],
    }
    refused(convert, swapped, r"bn1\.running_var is a variance, and has numbers below 0")


# Biases.


def test_our_blocks_always_have_biases(convert, generator):
    tensors = SOURCES["detectron2"](generator)
    convs = [f"res4.non_local_6.{part}.bias" for part in ("theta", "phi", "g", "w_z")]
    for name in convs:
        del tensors[name]
    refused(convert, tensors, r"4 of the model's .*non_local_6\.theta\.bias: not in the file")


@pytest.mark.parametrize("source", ["mmdetection", "nonlocal_pytorch", "slowfast"])
def test_blocks_whose_convs_have_no_bias_at_all(convert, generator, source):
    tensors = SOURCES[source](generator)
    norms = ("bn", "W.1", "downsample.1")
    for name in list(tensors):
        if name.endswith(".bias") and not any(norm in name for norm in norms):
            del tensors[name]
    made = convert(tensors, config=R50, allow_moved=True)
    block = made.block("res4.non_local_6")
    assert not any(conv.bias.any() for conv in (block.theta, block.phi, block.g, block.w_z))
    assert any("no conv of the file's blocks has a bias" in note for note in made.report.notes)


# What norms are, where only a factor and a summand of each are in the file.


def torchvision_with_group_norms(generator):
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(norm_layer=partial(torch.nn.GroupNorm, 32)).eval()
    for module in net.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.weight.data = 1 + 0.1 * random_tensor(generator, module.num_channels)
            module.bias.data = 0.1 * random_tensor(generator, module.num_channels)
    return net


RESNET_18 = [*("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64)]
RESNET_18 += ["MODEL.RESNETS.STEM_OUT_CHANNELS", 64, "MODEL.RESNETS.WIDTH_PER_GROUP", 64]


def test_group_norms_that_the_config_says(convert, generator, assert_same):
    net = torchvision_with_group_norms(generator)
    weights = net.state_dict()
    match = r"RESNETS\.NORM is FrozenBN.*no running statistics.*stem\.conv1\.norm\.running_mean.*NORM GN"
    refused(convert, weights, match, *RESNET_18)
    made = convert(weights, *RESNET_18, "MODEL.RESNETS.NORM", "GN", config=R50)
    assert any("taken to be the config's GN" in note for note in made.report.notes)
    x = images(generator)
    with torch.no_grad():
        y = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
        check(assert_same, made.backbone(), x, {"res2": y, "res3": net.layer2(y)})


@pytest.mark.parametrize(
    "net", [DETECTRON2, TORCHVISION, SLOWFAST], ids=["detectron2", "torchvision", "slowfast"]
)
def test_batch_norms_in_a_config_with_group_norms(convert, generator, assert_same, net):
    tensors = net.random(generator)
    made = convert(tensors, "MODEL.RESNETS.NORM", "GN", "MODEL.RESNETS.STRIDE_IN_1X1", False, config=R50)
    assert made.report.settings["MODEL.RESNETS.NORM"].before == "GN"
    assert made.cfg.MODEL.RESNETS.NORM == "FrozenBN"
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x if net.time is None else still(x)))


def still(x):
    return x[:, :, None].expand(-1, -1, 3, -1, -1)


@pytest.mark.parametrize(("norm", "set_to"), [("GN", "FrozenBN"), ("BN", "BN")])
def test_affine_layers_of_caffe2_are_no_group_norms(convert, generator, assert_same, norm, set_to):
    net = caffe2(leaves=("s", "b"), stride_in_1x1=True)
    tensors = net.random(generator)
    made = convert(tensors, "MODEL.RESNETS.NORM", norm, config=R50)
    assert set_to == made.cfg.MODEL.RESNETS.NORM
    assert any("weights are of frozen norms" in note for note in made.report.notes) == (norm == "BN")
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x))
    # One mean in the file, and the others are missing, not neutral.
    refused(convert, tensors | {"res2_0_branch2a_bn_rm": torch.ones(WIDTH)}, r"running_mean: not in the file")


def test_group_norms_of_caffe2(convert, generator, assert_same, monkeypatch):
    monkeypatch.setattr(source_nets, "STEM", 32)
    monkeypatch.setattr(source_nets, "WIDTH", 32)
    monkeypatch.setattr(source_nets, "normalise", lambda x, s, b: torch.nn.functional.group_norm(x, 32, s, b))
    net = ResNetNames(
        stem=("conv1_w", "conv1_gn_{leaf}"),
        conv=("res{stage}_{i}_branch2{abc}_w", "res{stage}_{i}_branch2{abc}_gn_{{leaf}}"),
        shortcut=("res{stage}_{i}_branch1_w", "res{stage}_{i}_branch1_gn_{{leaf}}"),
        leaves=("s", "b"),
    )
    tensors = net.random(generator)
    opts = ["MODEL.RESNETS.STEM_OUT_CHANNELS", 32, "MODEL.RESNETS.WIDTH_PER_GROUP", 32]
    opts += ["MODEL.RESNETS.RES2_OUT_CHANNELS", 128]
    made = convert(tensors, *opts, config=R50)
    assert (made.cfg.MODEL.RESNETS.NORM, made.cfg.MODEL.RESNETS.STRIDE_IN_1X1) == ("GN", False)
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x))
    mixed = {
        name.replace("_gn_", "_bn_") if "res3" in name else name: value for name, value in tensors.items()
    }
    refused(convert, mixed, "has batch norms and group norms", *opts)


def test_group_norms_of_blocks_are_asked_for(convert, generator):
    """How many groups there are is in no file; a batch norm that lost its statistics looks the same."""
    tensors = SOURCES["detectron2"](generator)
    tensors = {name: value for name, value in tensors.items() if "w_z.norm.running" not in name}
    match = r"NONLOCAL\.NORM is '{}', and the weights are of 'GN' or 'LN'.*--opts MODEL\.NONLOCAL\.NORM GN"
    for norm in ("", "BN"):
        refused(convert, tensors, match.format(norm), "MODEL.NONLOCAL.NORM", norm)
    for norm in ("GN", "LN"):
        made = convert(tensors, "MODEL.NONLOCAL.NORM", norm, config=R50)
        assert norm == made.cfg.MODEL.NONLOCAL.NORM
        assert any("MODEL.NONLOCAL.NORM: the weights do not tell" in note for note in made.report.notes)
    # Sources whose norm is a batch norm lack its statistics then.
    tensors = SOURCES["slowfast"](generator)
    tensors = {name: value for name, value in tensors.items() if "5.bn.running" not in name}
    refused(convert, tensors, r"w_z\.norm\.running_mean: not in the file", "MODEL.NONLOCAL.NORM", "GN")


def test_other_choices_that_neither_file_nor_config_makes(convert, generator):
    tensors = SOURCES["slowfast"](generator)
    match = (
        r"POOL is 'embedding', and the weights are of 'input' or 'none'.*--opts MODEL\.NONLOCAL\.POOL input"
    )
    refused(convert, tensors, match, "MODEL.NONLOCAL.POOL", "embedding")
    match = "PAIRWISE is 'gaussian', and the weights are of 'embedded_gaussian' or 'dot_product'"
    refused(convert, tensors, match, "MODEL.NONLOCAL.PAIRWISE", "gaussian")
    pooled = {
        name.replace("phi.0", "phi"): value for name, value in SOURCES["nonlocal_pytorch"](generator).items()
    }
    refused(convert, pooled, "pools one of g and phi and not the other")


# Blocks alone, and a net from another file.


@pytest.mark.parametrize("base", ["caffe2", "torchvision"])
@pytest.mark.parametrize("source", ["authors", "slowfast", "mmdetection", "nonlocal_pytorch"])
def test_blocks_say_nothing_of_the_net_that_they_are_put_into(convert, generator, tmp_path, source, base):
    torch.save(SOURCES[base](generator), tmp_path / "base.pth")
    alone = convert(tmp_path / "base.pth", config=R50)
    tensors = SOURCES[source](generator)
    made = convert(tensors, base=tmp_path / "base.pth", blocks_only=True, allow_moved=True, config=R50)
    for key in ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1"):
        assert made.report.settings.get(key) == alone.report.settings.get(key), key
    assert not any("stem" in note or "stride" in note for note in made.report.notes)
    for name, value in alone.tensors.items():
        assert torch.equal(made.tensors[name], value)
    # And a file that has no more than blocks.
    if source in ("slowfast", "mmdetection"):
        marks = ("nonlocal5", "nonlocal_block")
        tensors = {name: value for name, value in tensors.items() if any(mark in name for mark in marks)}
        again = convert(tensors, base=tmp_path / "base.pth", allow_moved=True, config=R50)
        assert again.cfg == made.cfg
    if source == "slowfast":
        without = convert(tensors, config=R50)
        assert all(".non_local_" in name for name in without.tensors)
        assert all("NONLOCAL" in key or "BACKBONE" in key for key in without.report.settings)


def test_the_file_goes_before_the_base_under_whatever_names(convert, generator, tmp_path):
    """A detector gives the heads, and its backbone, whose names are longer, is not taken."""
    torch.manual_seed(0)
    detector = build_model(get_config(R50, SMALL)).state_dict()
    torch.save({"model": detector}, tmp_path / "detector.pth")
    made = convert(TORCHVISION.random(generator), base=tmp_path / "detector.pth", config=R50)
    backbone = convert(made.path, config=R50, out="again.pth").tensors
    alone = convert(TORCHVISION.random(torch.Generator().manual_seed(0)), config=R50).tensors
    assert set(backbone) == set(detector)
    for name, value in backbone.items():
        assert torch.equal(value, alone[name] if "bottom_up" in name else detector[name])
    assert made.cfg.INPUT.FORMAT == "RGB"
    assert "detector.pth: roi_heads.box_head.fc1.weight -> roi_heads.box_head.fc1.weight" in str(made.report)
    lacking = {name: value for name, value in TORCHVISION.random(generator).items() if "layer4" not in name}
    torch.save(TORCHVISION.random(generator), tmp_path / "other.pth")
    refused(
        convert, lacking, r"a part of the ResNet \(.*res5.* come from --base", base=tmp_path / "other.pth"
    )


def test_nothing_is_left(convert, generator):
    refused(convert, TORCHVISION.random(generator), "nothing of the file is left", blocks_only=True)
    refused(convert, TORCHVISION.random(generator), "nothing of the file is left", skip=".")


def test_a_head_that_lost_a_block(convert):
    """Of blocks after every second of six convs the middle one."""
    config = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
    opts = ["MODEL.RESNETS.DEPTH", 50, "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", (8,) * 6]
    state = build_model(get_config(config, [*SMALL, *opts])).state_dict()
    left = {name: value for name, value in state.items() if "keypoint_head.non_local_4" not in name}
    refused(convert, left, r"after the convs \[2, 6\] of 6", *opts, config=config)


# Two tensors for one name.


def test_two_tensors_for_one_name(convert, generator):
    tensors = DETECTRON2.random(generator)
    twice = tensors | {"backbone.bottom_up.stem.conv1.weight": 2 * tensors["stem.conv1.weight"]}
    match = r"both stem\.conv1\.weight and backbone\.bottom_up\.stem\.conv1\.weight would become .*--skip"
    refused(convert, twice, match)
    made = convert(twice, skip="^stem.conv1.weight", config=R50)
    assert torch.equal(
        made.tensors["backbone.bottom_up.stem.conv1.weight"], twice["backbone.bottom_up.stem.conv1.weight"]
    )
    tensors = mmdetection(TORCHVISION.random(generator))["state_dict"]
    tensors["conv1.weight"] = torch.ones(STEM, 3, 7, 7)
    refused(convert, tensors, r"both backbone\.conv1\.weight and conv1\.weight are conv1\.weight")


# What a Detectron2 file says of pixels.


def pixels(mean, std=(1, 1, 1)):
    return {
        "pixel_mean": torch.tensor(mean, dtype=torch.float32).view(3, 1, 1),
        "pixel_std": torch.tensor(std, dtype=torch.float32).view(3, 1, 1),
    }


@pytest.mark.parametrize(
    ("mean", "std", "order", "changed", "said"),
    [
        ((103.53, 116.28, 123.675), (1, 1, 1), "BGR", [], "as the config says"),
        (
            (123.675, 116.28, 103.53),
            (1, 1, 1),
            "RGB",
            ["INPUT.FORMAT", "MODEL.PIXEL_MEAN"],
            "not as the config",
        ),
        ((5, 6, 7), (2, 3, 4), "BGR", ["MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"], "does not say the order"),
        ((103.53, 116.28, 123.675), (57.375, 57.12, 58.395), "BGR", ["MODEL.PIXEL_STD"], "not as the config"),
    ],
)
def test_pixels_in_a_file_of_detectron2(convert, generator, mean, std, order, changed, said):
    made = convert(DETECTRON2.random(generator) | pixels(mean, std), config=R50)
    assert list(made.report.settings) == changed
    assert order == made.cfg.INPUT.FORMAT
    assert list(mean) == pytest.approx(made.cfg.MODEL.PIXEL_MEAN)
    assert list(std) == pytest.approx(made.cfg.MODEL.PIXEL_STD)
    assert any(said in note for note in made.report.notes)
    assert made.report.skipped["pixel_mean"] == "in the config"


def test_pixels_that_cannot_be(convert, generator):
    tensors = DETECTRON2.random(generator)
    refused(convert, tensors | pixels((1, 2, 3), (0, 1, 1)), r"pixel_std is \[0\.0, 1\.0")
    match = r"pixel_mean has 4 channels and the config's MODEL\.PIXEL_MEAN 3"
    refused(convert, tensors | {"pixel_mean": torch.ones(4, 1, 1)}, match)


# The stem's pool.


@pytest.mark.parametrize(
    "source", ["mmaction2", "mmdetection", "nonlocal_pytorch", "slowfast", "torchvision"]
)
def test_nets_that_pad_their_pool(convert, generator, source):
    tensors = SOURCES[source](generator)
    refused(convert, tensors, "pads its max pool; leave the flag out", unpadded_pool=True)
    name = "build_resnet_fpn_backbone"
    key = "MODEL.BACKBONE.NAME"
    made = convert(tensors, key, f"{name}_unpadded_pool", config=R50, allow_moved=True)
    found = made.cfg.MODEL.BACKBONE.NAME
    assert name in (found, made.cfg.MODEL.NONLOCAL.BACKBONE if source != "torchvision" else None)
    assert type(made.backbone().stem).__name__ == "BasicStem"


# Blocks of which only a part is there, on the way back.


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("lost", ["phi.weight", "w_z.bias"])
def test_half_a_block_is_stripped_whole_and_only_if_asked(convert, lost, identity):
    torch.manual_seed(0)
    state = build_model(get_config(R50_NL, SMALL)).state_dict()
    prefix = "backbone.bottom_up.res4.non_local_5."
    if not identity:
        state[f"{prefix}w_z.weight"] = torch.ones_like(state[f"{prefix}w_z.weight"])
    del state[prefix + lost]
    options = {"config": R50_NL, "target": "detectron2"}
    refused(convert, state, rf"{re.escape(prefix + lost)}: not in the file", **options)
    options["allow_missing"] = "non_local"
    refused(convert, state, r"1 of 1 non-local blocks do something.*--strip-trained", **options)
    made = convert(state, **options, strip_trained=True)
    assert not any("non_local" in name for name in made.tensors)
    assert not any("non_local" in name for names in made.report.expected.values() for name in names)
    assert made.model().missing == []
    options["target"] = "mmcv"
    refused(
        convert,
        state,
        rf"{re.escape(prefix + lost)} is not in the file",
        "MODEL.NONLOCAL.POOL",
        "none",
        **options,
    )


def test_blocks_of_the_authors_without_a_norm_or_half_of_one(convert, generator):
    net = caffe2(leaves=("s", "b"), time=(1, 1)).random(generator)
    block = random_block(generator, C, AUTHORS, dims=3)
    saved = net | {
        authors_block_name(4, 5, part): value for part, value in block.items() if "running" not in part
    }
    tensors = {
        name: value for name, value in authors_net(generator).items() if "nonlocal_conv4_5_bn" not in name
    }
    made = convert(tensors, config=R50)
    assert any("'nonlocal.conv4.5' has no norm, although" in note for note in made.report.notes)
    for part, lost in (("norm.bias", "w_z.norm.bias"), ("out.weight", "w_z.weight")):
        left = {name: value for name, value in saved.items() if name != authors_block_name(4, 5, part)}
        refused(convert, left, rf"has an affine layer, and no {re.escape(lost)}")


RESIDUAL = ("MODEL.NONLOCAL.BLOCK", "residual")


def test_residual_blocks_in_the_place_of_non_local_ones(convert, generator):
    state = build_model(get_config(R50_NL, [*SMALL, *RESIDUAL])).state_dict()
    made = convert(state, *RESIDUAL, config=R50_NL)
    assert set(made.tensors) == set(state)
    refused(convert, state, "those are not stripped", *RESIDUAL, config=R50_NL, target="detectron2")
    refused(convert, state, r"no place in the config's model \(backbone.*\.residual_5", config=R50_NL)
    made = convert(SOURCES["slowfast"](generator), *RESIDUAL, config=R50_NL)
    assert made.cfg.MODEL.NONLOCAL.BLOCK == "non_local"


# The report.


def test_the_report_counts_what_is_alike(convert, tmp_path):
    torch.manual_seed(0)
    state = build_model(get_config(R50_NL, SMALL)).state_dict()
    text = str(convert({"model": state}).report).splitlines()
    assert f"  {len(state)} tensors keep their names" in text
    assert len(text) < 12
    (tmp_path / "R-50.pkl").write_bytes(
        pickle.dumps({name: value.numpy() for name, value in SOURCES["caffe2"](torch.Generator()).items()})
    )
    made = convert(tmp_path / "R-50.pkl", config=R50)
    text = str(made.report)
    assert "(not in the file) 106 filled in: neutral, for an affine layer without statistics" in text
    for move in made.report.moves:
        assert (str(move) in text) == bool(move.origin)
