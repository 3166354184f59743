"""Whole ResNets, with and without blocks inside: every source's net against ours with its weights."""

import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from small_model import R50, R50_NL
from source_nets import (
    AUTHORS,
    BLOCKS,
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
    convolve,
    images,
    mmdetection,
    non_local,
    normalise,
    outputs,
    python_2_pickle,
    random_block,
    random_norm,
    random_tensor,
)

from nonlocal_det.errors import CheckpointError


def still(x, frames=3):
    return x[:, :, None].expand(-1, -1, frames, -1, -1)


def apply_block(tensors, modules, x, **options):
    """The block's output, with tensors by modules."""

    def conv(part):
        name = modules[part]
        return lambda y: convolve(y, tensors[f"{name}.weight"], bias=tensors.get(f"{name}.bias"))

    def out(y):
        y = conv("out")(y)
        if f"{modules['norm']}.weight" in tensors:
            y = normalise(y, *(tensors[f"{modules['norm']}.{leaf}"] for leaf in STATISTICS))
        return y

    return non_local(x, conv("theta"), conv("phi"), conv("g"), out, **options)


def test_torchvision(convert, generator, assert_same):
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(weights=None).eval()  # the real one; small nets of it do not exist
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            values = random_norm(generator, module.num_features, STATISTICS)
            module.load_state_dict(values, strict=False)
    opts = [*("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64)]
    opts += ["MODEL.RESNETS.STEM_OUT_CHANNELS", 64, "MODEL.RESNETS.WIDTH_PER_GROUP", 64]
    made = convert(net.state_dict(), *opts, "MODEL.NONLOCAL.RES4", [1])
    assert made.cfg.INPUT.FORMAT == "RGB"
    assert pytest.approx([0.485 * 255, 0.456 * 255, 0.406 * 255]) == made.cfg.MODEL.PIXEL_MEAN
    assert pytest.approx([0.229 * 255, 0.224 * 255, 0.225 * 255]) == made.cfg.MODEL.PIXEL_STD
    assert made.report.source == "torchvision's ResNet"
    assert "INPUT.FORMAT" in made.report.settings  # the COCO configs are BGR, and it is said
    x = images(generator)
    y = net.maxpool(net.relu(net.bn1(net.conv1(x))))
    expected = {}
    with torch.no_grad():
        for stage, layer in enumerate((net.layer1, net.layer2, net.layer3, net.layer4), start=2):
            y = expected[f"res{stage}"] = layer(y)
    check(assert_same, made.backbone(), x, expected)  # the new block is an identity
    assert all(why.startswith("a counter") or "classifier" in why for why in made.report.skipped.values())


@pytest.mark.parametrize("config", [R50, R50_NL])
def test_msra(convert, generator, assert_same, tmp_path, config):
    net = caffe2(leaves=("s", "b"), stride_in_1x1=True)
    tensors = net.random(generator)
    saved = {name: value.numpy() for name, value in tensors.items()}
    saved |= {"conv1_b": torch.zeros(STEM).numpy(), "fc1000_w": torch.ones(10, 4).numpy()}
    saved |= {"fc1000_b": torch.ones(10).numpy(), "conv1_w_momentum": torch.ones(1).numpy()}
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps(saved))
    made = convert(tmp_path / "R-50.pkl", config=config)
    assert made.report.source.startswith("Caffe2")
    assert made.report.settings == {}  # Detectron2's configs are for these weights
    assert any("BGR" in note and "as the config says" in note for note in made.report.notes)
    assert made.report.skipped["conv1_b"] == "a bias of zero"
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x))


def test_msra_with_a_bias_before_the_norm(convert, generator, assert_same, tmp_path):
    net = caffe2(leaves=("s", "b"), stride_in_1x1=True)
    tensors = net.random(generator)
    bias = random_tensor(generator, STEM)
    (tmp_path / "R-50.pkl").write_bytes(
        pickle.dumps({name: value.numpy() for name, value in (tensors | {"conv1_b": bias}).items()})
    )
    made = convert(tmp_path / "R-50.pkl", config=R50)
    tensors["res_conv1_bn_b"] = tensors["res_conv1_bn_b"] + bias * tensors["res_conv1_bn_s"]
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x))


@pytest.mark.parametrize(
    ("kind", "form", "scale"),
    [
        ("I3D", "embedded_gaussian", True),
        ("C2D", "dot_product", True),
        ("frozen", "embedded_gaussian", False),  # affine layers for batch norms, and no norm in the blocks
        ("no bias", "embedded_gaussian", True),
    ],
)
def test_authors(convert, generator, assert_same, tmp_path, kind, form, scale):
    frozen = kind == "frozen"
    net = caffe2(
        leaves=("s", "b") if frozen else ("s", "b", "rm", "riv"),
        pool_padding=0,
        time=(5, 3) if kind == "I3D" else (1, 1),
    )
    tensors = net.random(generator)
    blocks = {
        (stage, i): random_block(generator, 4 * WIDTH * 2 ** (stage - 2), AUTHORS, dims=3, norm=not frozen)
        for stage, places in ((3, (1, 3)), (4, (1, 3, 5)))  # every second one
        for i in places
    }
    if kind == "no bias":
        for block in blocks.values():
            for name in [name for name in block if name.endswith(".bias") and not name.startswith("norm")]:
                del block[name]
    saved = dict(tensors)
    for (stage, i), block in blocks.items():
        saved |= {authors_block_name(stage, i, part): value for part, value in block.items()}
    saved |= {f"{name}_momentum": torch.ones(1) for name in list(saved) if not name.endswith(("_rm", "_riv"))}
    saved |= {"pred_w": torch.ones(4, 5), "pred_b": torch.ones(4), "lr": torch.ones(1), "model_iter": 7}
    (tmp_path / "net.pkl").write_bytes(python_2_pickle({"blobs": saved}))

    made = convert(
        tmp_path / "net.pkl",
        *("MODEL.NONLOCAL.PAIRWISE", form, "MODEL.NONLOCAL.SCALE", scale),
        config=R50,
        unpadded_pool=True,
    )
    node = made.cfg.MODEL.NONLOCAL
    assert (list(node.RES3), list(node.RES4), node.POOL) == ([2, 4], [2, 4, 6], "input")
    assert ("" if frozen else "BN") == node.NORM
    assert (made.cfg.INPUT.FORMAT, made.cfg.MODEL.PIXEL_STD[0]) == ("RGB", 57.375)
    summed = [move for move in made.report.moves if "summed over its" in move.how]
    assert len(summed) == (1 + sum(BLOCKS) if kind == "I3D" else 0)
    assert any("17 convs over time were summed" in note for note in made.report.notes) == bool(summed)
    assert made.report.source == "the authors' Caffe2 nets"

    def after(stage, i, x):
        block = blocks.get((stage, i))
        return x if block is None else apply_block(block, AUTHORS, x, form=form, pool="input", scale=scale)

    # Half of a side is odd, so that both stems have the same number of cells.
    x = images(generator, 66)
    check(assert_same, made.backbone(), x, net.forward(tensors, still(x), after))


def test_authors_affine_after_a_block(convert, generator, assert_same, tmp_path):
    net = caffe2(leaves=("s", "b"), pool_padding=0, time=(1, 1))
    tensors = net.random(generator)
    block = random_block(generator, 16 * WIDTH, AUTHORS, dims=3)
    saved = tensors | {
        authors_block_name(4, 5, part): value for part, value in block.items() if "running" not in part
    }
    (tmp_path / "net.pkl").write_bytes(python_2_pickle({"blobs": saved}))
    made = convert(tmp_path / "net.pkl", config=R50, unpadded_pool=True)
    assert made.cfg.MODEL.NONLOCAL.NORM == ""
    block |= {"norm.running_mean": torch.zeros(16 * WIDTH), "norm.running_var": torch.ones(16 * WIDTH) - 1e-5}

    def after(stage, i, x):
        if (stage, i) != (4, 5):
            return x
        return apply_block(block, AUTHORS, x, form="embedded_gaussian", pool="input", scale=True)

    x = images(generator, 66)
    check(assert_same, made.backbone(), x, net.forward(tensors, still(x), after))


def test_the_authors_pool_is_offered_and_only_said_unless_asked_for(convert, generator, tmp_path):
    tensors = caffe2(leaves=("s", "b", "rm", "riv"), time=(1, 1)).random(generator)
    (tmp_path / "net.pkl").write_bytes(python_2_pickle({"blobs": tensors}))
    made = convert(tmp_path / "net.pkl", config=R50)
    assert made.cfg.MODEL.BACKBONE.NAME == "build_resnet_fpn_backbone"
    assert any("--unpadded-pool" in note for note in made.report.notes)
    with_flag = convert(tmp_path / "net.pkl", config=R50, unpadded_pool=True)
    assert not any("--unpadded-pool" in note for note in with_flag.report.notes)
    x = random_tensor(generator, 1, 3, 64, 96)
    padded, unpadded = outputs(made.model().backbone, x), outputs(with_flag.model().backbone, x)
    assert padded["p2"].shape == unpadded["p2"].shape  # a pyramid works with both
    assert not torch.allclose(padded["p2"], unpadded["p2"])


def test_slowfast(convert, generator, assert_same):
    modules = {"theta": "conv_theta", "phi": "conv_phi", "g": "conv_g", "out": "conv_out", "norm": "norm"}
    tensors = SLOWFAST.random(generator)
    blocks = {
        (stage, i): random_block(generator, 4 * WIDTH * 2 ** (stage - 2), modules, dims=3)
        for stage, i in ((3, 1), (3, 3), (4, 1), (4, 5))
    }
    saved = dict(tensors)
    for (stage, i), block in blocks.items():
        saved |= {f"s{stage}.pathway0_nonlocal{i}.{name}": value for name, value in block.items()}
    saved |= {"head.projection.weight": torch.ones(3, 4), "head.projection.bias": torch.ones(3)}
    made = convert({"epoch": 3, "model_state": saved, "cfg": "TRAIN: {}"}, config=R50)
    assert made.report.source == "SlowFast"
    node = made.cfg.MODEL.NONLOCAL
    assert (list(node.RES3), list(node.RES4), node.NORM) == ([2, 4], [2, 6], "BN")

    def after(stage, i, x):
        block = blocks.get((stage, i))
        options = {"form": "embedded_gaussian", "pool": "input", "scale": True}
        return x if block is None else apply_block(block, modules, x, **options)

    x = images(generator)
    check(assert_same, made.backbone(), x, SLOWFAST.forward(tensors, still(x), after))


@pytest.mark.parametrize("pooled", [True, False])
def test_mmaction2(convert, generator, assert_same, pooled):
    end = ".0.conv" if pooled else ".conv"
    modules = {"theta": "theta.conv", "phi": f"phi{end}", "g": f"g{end}"}
    modules |= {"out": "conv_out.conv", "norm": "conv_out.bn"}
    tensors = MMACTION2.random(generator)
    blocks = {
        (stage, i): random_block(generator, 4 * WIDTH * 2 ** (stage - 2), modules, dims=3, out_bias=False)
        for stage, i in ((3, 1), (4, 2))
    }
    saved = tensors | {"cls_head.fc_cls.weight": torch.ones(2, 2)}
    for (stage, i), block in blocks.items():
        saved |= {
            f"backbone.layer{stage - 1}.{i}.non_local_block.{name}": value for name, value in block.items()
        }
    made = convert({"meta": {"epoch": 1}, "state_dict": saved}, "MODEL.NONLOCAL.SCALE", False, config=R50)
    assert made.report.source == "mmaction2's ResNet3d"
    node = made.cfg.MODEL.NONLOCAL
    pool = "embedding" if pooled else "none"
    assert (list(node.RES3), list(node.RES4), node.POOL) == ([2], [3], pool)

    def after(stage, i, x):
        block = blocks.get((stage, i))
        options = {"form": "embedded_gaussian", "pool": pool, "scale": False}
        return x if block is None else apply_block(block, modules, x, **options)

    x = images(generator)
    check(assert_same, made.backbone(), x, MMACTION2.forward(tensors, still(x), after))


@pytest.mark.parametrize("style", ["pytorch", "caffe"])
def test_mmdetections_resnet(convert, generator, assert_same, style):
    net = ResNetNames(
        stem=TORCHVISION.stem,
        conv=TORCHVISION.conv,
        shortcut=TORCHVISION.shortcut,
        leaves=STATISTICS,
        stride_in_1x1=style == "caffe",
    )
    tensors = net.random(generator)
    made = convert(mmdetection(tensors, style=style), config=R50)
    assert (made.cfg.INPUT.FORMAT, made.cfg.MODEL.PIXEL_STD[0]) == (
        ("BGR", 1.0) if style == "caffe" else ("RGB", 58.395)
    )
    x = images(generator)
    check(assert_same, made.backbone(), x, net.forward(tensors, x))


def mmdetection_heads(generator, classes=80):
    """The neck and heads of mmdetection's Mask R-CNN: names, and shapes of the small detector's."""
    shapes = {
        "rpn_head.rpn_conv": (8, 8, 3, 3),
        "rpn_head.rpn_cls": (3, 8, 1, 1),
        "rpn_head.rpn_reg": (12, 8, 1, 1),
    }
    for level, channels in enumerate((4 * WIDTH, 8 * WIDTH, 16 * WIDTH, 32 * WIDTH)):
        shapes[f"neck.lateral_convs.{level}.conv"] = (8, channels, 1, 1)
        shapes[f"neck.fpn_convs.{level}.conv"] = (8, 8, 3, 3)
    box, mask = "roi_head.bbox_head.", "roi_head.mask_head."
    shapes |= {f"{box}shared_fcs.0": (8, 8 * 49), f"{box}shared_fcs.1": (8, 8)}
    shapes |= {f"{box}fc_cls": (classes + 1, 8), f"{box}fc_reg": (4 * classes, 8)}
    shapes |= {f"{mask}convs.{i}.conv": (8, 8, 3, 3) for i in range(4)}
    shapes |= {f"{mask}upsample": (8, 8, 2, 2), f"{mask}conv_logits": (classes, 8, 1, 1)}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = random_tensor(generator, *shape) * math.prod(shape[1:]) ** -0.5
        tensors[f"{name}.bias"] = 0.1 * random_tensor(generator, 8 if name.endswith("upsample") else shape[0])
    return tensors


@torch.no_grad()
def test_mmdetections_mask_rcnn(convert, generator, assert_same):
    resnet, heads = TORCHVISION.random(generator), mmdetection_heads(generator)
    made = convert(mmdetection(resnet, heads=heads), config=R50)
    model = made.model()
    assert model.missing == []

    def conv(name, x):
        return convolve(x, heads[f"{name}.weight"], bias=heads[f"{name}.bias"])

    def linear(name, x):
        return F.linear(x, heads[f"{name}.weight"], heads[f"{name}.bias"])

    # A feature pyramid: the coarser map twice as large, added to the finer; p6 is every second cell of p5.
    x = random_tensor(generator, 1, 3, 64, 96)
    levels = list(TORCHVISION.forward(resnet, x).values())
    merged, pyramid = None, {}
    for i in (3, 2, 1, 0):
        lateral = conv(f"neck.lateral_convs.{i}.conv", levels[i])
        merged = (
            lateral if merged is None else lateral + merged.repeat_interleave(2, 2).repeat_interleave(2, 3)
        )
        pyramid[f"p{i + 2}"] = conv(f"neck.fpn_convs.{i}.conv", merged)
    pyramid["p6"] = pyramid["p5"][:, :, ::2, ::2]
    found = model.backbone(x)
    for name, expected in pyramid.items():
        assert_same(found[name], expected)
    # Proposals: one conv, then a score and four deltas of each of three anchors.
    hidden = conv("rpn_head.rpn_conv", pyramid["p3"]).relu()
    scores, deltas = model.proposal_generator.rpn_head([pyramid["p3"]])
    assert_same(scores[0], conv("rpn_head.rpn_cls", hidden))
    assert_same(deltas[0], conv("rpn_head.rpn_reg", hidden))
    # Boxes: two layers, then classes with the background last, and four deltas a class.
    regions = random_tensor(generator, 5, 8, 7, 7)
    hidden = regions.flatten(1)
    for i in range(2):
        hidden = linear(f"roi_head.bbox_head.shared_fcs.{i}", hidden).relu()
    classes, deltas = model.roi_heads.box_predictor(model.roi_heads.box_head(regions))
    assert_same(classes, linear("roi_head.bbox_head.fc_cls", hidden))
    assert_same(deltas, linear("roi_head.bbox_head.fc_reg", hidden))
    # Masks: four convs, a transposed conv, a conv.
    y = regions
    for i in range(4):
        y = conv(f"roi_head.mask_head.convs.{i}.conv", y).relu()
    upsample = "roi_head.mask_head.upsample"
    y = F.conv_transpose2d(y, heads[f"{upsample}.weight"], heads[f"{upsample}.bias"], stride=2).relu()
    assert_same(model.roi_heads.mask_head.layers(regions), conv("roi_head.mask_head.conv_logits", y))


def test_what_does_not_fit_is_left_out_or_missing_only_if_asked(convert, generator):
    heads = mmdetection_heads(generator)
    heads |= {"roi_head.bbox_head.extra.weight": torch.ones(1)}
    del heads["rpn_head.rpn_cls.weight"]
    content = mmdetection(TORCHVISION.random(generator), heads=heads)
    with pytest.raises(CheckpointError, match=r"1 of their tensors.*bbox_head\.extra\.weight.*--skip"):
        convert(content, config=R50)
    with pytest.raises(CheckpointError, match=r"objectness_logits\.weight: not in the file.*--allow-missing"):
        convert(content, config=R50, skip=r"\.extra\.")
    made = convert(content, config=R50, skip=r"\.extra\.", allow_missing="objectness")
    assert made.report.skipped["roi_head.bbox_head.extra.weight"] == "asked for by --skip"
    assert [name for names in made.report.expected.values() for name in names] == [
        "proposal_generator.rpn_head.objectness_logits.weight"
    ]
    with pytest.raises(CheckpointError, match="not a regular expression"):
        convert(content, config=R50, skip="(")


def test_mmdetections_plugin_works_elsewhere_and_is_moved_only_if_asked(convert, generator, assert_same):
    tensors = TORCHVISION.random(generator)
    block = random_block(generator, 16 * WIDTH, MMCV, dims=2, out_bias=False)
    content = mmdetection(tensors, {"layer3.2.nonlocal_block": block})
    with pytest.raises(
        CheckpointError, match=r"layer3\.2\.nonlocal_block works on the residual branch.*--allow-moved"
    ):
        convert(content, config=R50)
    made = convert(content, config=R50, allow_moved=True)
    assert list(made.cfg.MODEL.NONLOCAL.RES4) == [3]
    assert any("does not compute the same" in note for note in made.report.notes)
    options = {"form": "embedded_gaussian", "pool": "none", "scale": True}
    x = random_tensor(generator, 1, 16 * WIDTH, 6, 6)
    with torch.no_grad():  # the block itself is the same
        assert_same(made.block("res4.non_local_3")(x), apply_block(block, MMCV, x, **options))
    x = images(generator)

    def moved(stage, i, y):
        return apply_block(block, MMCV, y, **options) if (stage, i) == (4, 2) else y

    check(assert_same, made.backbone(), x, TORCHVISION.forward(tensors, x, after=moved))
    theirs = TORCHVISION.forward(tensors, x, in_branch=moved)
    assert not torch.allclose(outputs(made.backbone(), x)["res4"], theirs["res4"], atol=1e-3)


def test_a_plugin_after_conv2_is_refused(convert, generator):
    block = random_block(generator, 4 * WIDTH, MMCV, dims=2, out_bias=False)
    content = mmdetection(TORCHVISION.random(generator), {"layer3.2.nonlocal_block": block})
    with pytest.raises(CheckpointError, match="after its conv1 or conv2"):
        convert(content, config=R50, allow_moved=True)


def test_non_local_pytorch_inside_a_resnet(convert, generator, assert_same):
    modules = {"theta": "theta", "phi": "phi.0", "g": "g.0", "out": "W.0", "norm": "W.1"}
    tensors = TORCHVISION.random(generator)
    block = random_block(generator, 16 * WIDTH, modules, dims=2)
    saved = tensors | {f"nl_block.{name}": value for name, value in block.items()}
    saved |= {"fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}
    saved = {f"module.{name}": value for name, value in saved.items()}  # DataParallel
    options = {"form": "embedded_gaussian", "pool": "embedding", "scale": False}
    x = images(generator)

    def after(stage, i, y):
        return apply_block(block, modules, y, **options) if (stage, i) == (4, 4) else y

    opts = ["MODEL.RESNETS.STRIDE_IN_1X1", False]
    expected = TORCHVISION.forward(tensors, x, after)
    # The config's only place, and one that is named.
    check(assert_same, convert(saved, *opts).backbone(), x, expected)
    made = convert(saved, *opts, config=R50, places={"nl_block": "res4.-1"})
    check(assert_same, made.backbone(), x, expected)
    assert list(made.cfg.MODEL.NONLOCAL.RES4) == [5]


def test_non_local_pytorch_between_residual_blocks(convert, generator, assert_same):
    """A block in a stage's Sequential takes a number, and the residual blocks after it have one more."""
    modules = {"theta": "theta", "phi": "phi", "g": "g", "out": "W", "norm": "none"}
    tensors = TORCHVISION.random(generator)
    blocks = {i: random_block(generator, 16 * WIDTH, modules, dims=2, norm=False) for i in (2, 4, 5)}
    saved = {}
    for name, value in tensors.items():
        parts = name.split(".")
        if parts[0] == "layer3":
            parts[1] = str(int(parts[1]) + sum(i < int(parts[1]) for i in blocks))
        saved[".".join(parts)] = value
    for before, (i, block) in enumerate(blocks.items()):
        saved |= {f"layer3.{i + 1 + before}.{name}": value for name, value in block.items()}
    made = convert(saved, "MODEL.RESNETS.STRIDE_IN_1X1", False, config=R50)
    assert list(made.cfg.MODEL.NONLOCAL.RES4) == [3, 5, 6]

    def after(stage, i, y):
        options = {"form": "embedded_gaussian", "pool": "none", "scale": False}
        return apply_block(blocks[i], modules, y, **options) if stage == 4 and i in blocks else y

    x = images(generator)
    check(assert_same, made.backbone(), x, TORCHVISION.forward(tensors, x, after))


def test_resnext_and_group_norm_of_the_zoo():
    """X-101-32x8d divides its pixels; ResNeXt and group-norm nets have their strides in the 3x3 conv."""
    from nonlocal_det.convert.draft import read_draft
    from nonlocal_det.convert.sources.caffe2 import CAFFE2

    def settings(blocks, groups, norm):
        names = {"conv1_w": torch.ones(1), f"res2_0_branch2a_{norm}_s": torch.ones(1)}
        names["res2_0_branch2b_w"] = torch.ones(8, 8 // groups, 3, 3)
        names |= {f"res4_{i}_branch2a_w": torch.ones(1) for i in range(blocks)}
        draft = read_draft(CAFFE2, names, {})
        return draft.net.stride_in_1x1, draft.net.pixels.std

    assert settings(23, 1, "bn") == (True, (1, 1, 1))
    assert settings(23, 4, "bn") == (False, (57.375, 57.12, 58.395))
    assert settings(36, 4, "bn") == (False, (1, 1, 1))
    assert settings(6, 1, "gn") == (False, (1, 1, 1))


def test_blocks_with_the_backbone_of_another_file(convert, generator, assert_same, tmp_path):
    block = random_block(generator, 16 * WIDTH, MMCV, dims=2, out_bias=False)
    tensors = TORCHVISION.random(generator)
    torch.save(tensors, tmp_path / "backbone.pth")
    with pytest.raises(CheckpointError, match=r"1 of their tensors have no place.*other\.weight.*--skip"):
        convert(block | {"other.weight": torch.ones(2)})
    made = convert(block | {"other.weight": torch.ones(2)}, base=tmp_path / "backbone.pth", blocks_only=True)
    assert made.cfg.INPUT.FORMAT == "RGB"
    assert made.report.skipped["other.weight"] == "not in a block (--blocks-only)"
    x = images(generator)

    def after(stage, i, y):
        options = {"form": "embedded_gaussian", "pool": "none", "scale": True}
        return apply_block(block, MMCV, y, **options) if (stage, i) == (4, 4) else y

    check(assert_same, made.backbone(), x, TORCHVISION.forward(tensors, x, after))


def test_every_tensor_is_accounted_for(convert, generator):
    tensors = TORCHVISION.random(generator) | {"fc.weight": torch.ones(1), "fc.bias": torch.ones(1)}
    tensors |= {"bn1.num_batches_tracked": torch.tensor(3)}
    report = convert(tensors, config=R50).report
    moved = {move.origin for move in report.moves if move.origin}
    assert moved | set(report.skipped) == set(tensors)
    assert not moved & set(report.skipped)
    text = str(report)
    for name in tensors.keys() - {"bn1.num_batches_tracked"}:
        assert re.search(rf"^  {re.escape(name)}(:| ->)", text, re.MULTILINE)
    assert "  1 num_batches_tracked: not needed: a counter" in text
