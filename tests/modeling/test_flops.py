"""FLOPs against formulas written by hand, torch's own counter, and published figures."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("detectron2")

from detectron2.modeling import build_model

from nonlocal_det import ConfigError, get_config
from nonlocal_det.detection.cost import count_detector_flops
from nonlocal_det.layers import PAIRWISE_FUNCTIONS, NonLocalBlock
from nonlocal_det.modeling.flops import count_flops

R50 = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x{}.yaml"
SIZE = (800, 1344)


def block_flops(pairwise, pool, batch, channels, height, width):
    """Multiply-adds of a block with C' = C / 2, by hand."""
    inner = channels // 2
    n, m = height * width, height * width
    if pool != "none":
        m = (height // 2) * (width // 2)
    phi_and_g_positions = m if pool == "input" else n
    convs = 2 * n * channels * inner  # theta, W_z
    convs += 2 * phi_and_g_positions * channels * inner
    if pairwise == "embedded_gaussian":
        pairs = 2 * n * m * inner
    elif pairwise == "gaussian":
        convs -= (n + phi_and_g_positions) * channels * inner  # neither theta nor phi
        pairs = n * m * (channels + inner)
    elif pairwise == "dot_product":
        pairs = (n + m) * inner * inner
    else:
        pairs = (n + m) * inner  # a and b
        pairs += m * math.ceil(math.log2(m)) + n * math.ceil(math.log2(m + 1))
        # Sums of g and b g: each is put in order, added up, and looked up by every query.
        pairs += 2 * (m + m + n) * inner
    return batch * (convs + pairs)


@pytest.mark.parametrize("pool", ["input", "embedding", "none"])
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_block(pairwise, pool):
    block = NonLocalBlock(12, pairwise=pairwise, pool=pool)
    flops = count_flops(block, torch.zeros(3, 12, 7, 10))
    assert flops.total == block_flops(pairwise, pool, 3, 12, 7, 10)
    assert not flops.uncounted


@pytest.mark.parametrize(
    ("pairwise", "pool", "expected"),
    # DESIGN's own count for res4 at 800x1344, in units of 10^9.
    [
        ("embedded_gaussian", "input", 10.0),
        ("embedded_gaussian", "embedding", 13.3),
        ("embedded_gaussian", "none", 26.9),
        ("dot_product", "input", 6.9),
    ],
)
def test_formula_gives_the_known_figures(pairwise, pool, expected):
    assert block_flops(pairwise, pool, 1, 1024, 50, 84) / 1e9 == pytest.approx(expected, abs=0.05)


def test_attention_is_two_products():
    class Fused(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    class Explicit(nn.Module):
        def forward(self, q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v

    inputs = torch.zeros(2, 3, 11, 8), torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 7, 5)
    assert count_flops(Fused(), *inputs).total == count_flops(Explicit(), *inputs).total
    assert count_flops(Fused(), *inputs).total == 2 * 3 * 11 * 7 * (8 + 5)


def test_says_what_it_cannot_count():
    class Distance(nn.Module):
        def forward(self, a, b):
            return torch.cdist(a, b)

    assert count_flops(Distance(), torch.zeros(4, 3), torch.zeros(5, 3)).uncounted == {"aten::cdist"}


def detector(suffix, *options):
    return build_model(get_config(R50.format(suffix), ["MODEL.DEVICE", "cpu", *options])).eval()


@pytest.fixture(scope="module")
def small_counts():
    """Counts for an image of 64x64: baseline, and with one block."""
    counts = [count_detector_flops(detector(suffix), 64, 64) for suffix in ("", "_nl")]
    assert not counts[0].uncounted | counts[1].uncounted
    return [flops.parts for flops in counts]


def rpn_cells(height, width):
    return sum(math.ceil(height / s) * math.ceil(width / s) for s in (4, 8, 16, 32, 64))


def test_block_adds_at_most_4_percent(small_counts):
    """The count for 800x1344 follows exactly from a small one: convolutions grow with the area."""
    small, small_with_block = small_counts
    assert small_with_block["backbone"] - small["backbone"] == block_flops(
        "embedded_gaussian", "input", 1, 1024, 4, 4
    )
    assert {**small_with_block, "backbone": 0} == {**small, "backbone": 0}

    rpn_cell = 3 * 3 * 256 * 256 + 256 * 3 + 256 * 12
    assert small["rpn_head"] == rpn_cells(64, 64) * rpn_cell
    # Two fully connected layers, 80 classes and background, a box for each class.
    assert small["box_head"] == 1000 * (7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * 81 + 1024 * 320)
    # Four convolutions, a 2x2 deconvolution, the predictor.
    assert small["mask_head"] == 100 * 14 * 14 * (4 * 9 * 256 * 256 + 4 * 256 * 256 + 4 * 256 * 80)

    backbone = small["backbone"] * (SIZE[0] * SIZE[1]) / (64 * 64)
    assert backbone / 1e9 == pytest.approx(143.8, rel=0.005)
    total = backbone + rpn_cells(*SIZE) * rpn_cell + small["box_head"] + small["mask_head"]
    assert total / 1e9 == pytest.approx(264.0, rel=0.005)
    added = block_flops("embedded_gaussian", "input", 1, 1024, SIZE[0] // 16, SIZE[1] // 16)
    assert added / total <= 0.04
    assert added / total == pytest.approx(0.038, abs=0.0005)


def test_backbone_as_torch_counts_it(small_counts):
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):  # shapes without numbers: the whole image at no cost
        model = build_model(get_config(R50.format(""), ["MODEL.DEVICE", "meta"])).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.backbone(torch.empty(1, 3, *SIZE, device="meta"))
    # It counts a multiply-add as two, and neither norms nor upsampling: 0.3 %.
    ours = small_counts[0]["backbone"] * (SIZE[0] * SIZE[1]) / (64 * 64)
    assert ours == pytest.approx(counter.get_total_flops() / 2, rel=0.004)


@pytest.mark.slow
def test_block_adds_at_most_4_percent_counted_at_full_size():
    totals = [count_detector_flops(detector(suffix), *SIZE).total for suffix in ("", "_nl")]
    assert totals[0] / 1e9 == pytest.approx(264.0, rel=0.005)
    assert totals[1] / totals[0] <= 1.04


@pytest.mark.parametrize(
    ("config_file", "parts"),
    [
        ("Ablations/retinanet_R_50_FPN_1x_nl.yaml", {"backbone", "head"}),
        ("Ablations/mask_rcnn_R_50_C4_1x_nl.yaml", {"backbone", "rpn_head", "box_head", "mask_head"}),
        (
            "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml",
            {"backbone", "rpn_head", "box_head", "keypoint_head"},
        ),
    ],
)
def test_other_detectors(config_file, parts, small_options):
    def count(proposals=1000, detections=100):
        model = build_model(get_config(config_file, small_options())).eval()
        return count_detector_flops(model, 64, 64, proposals, detections)

    flops = count()
    assert set(flops.parts) == parts
    assert all(flops.parts.values())
    assert not flops.uncounted
    if "box_head" in parts:
        fewer = count(proposals=500, detections=10).parts
        assert fewer["box_head"] * 2 == flops.parts["box_head"]
        head = next(name for name in ("mask_head", "keypoint_head") if name in parts)
        assert fewer[head] * 10 == flops.parts[head]


def test_unknown_detector(small_options):
    options = small_options({"MODEL.META_ARCHITECTURE": "ProposalNetwork"})
    with pytest.raises(ConfigError, match=r"MODEL.META_ARCHITECTURE.*GeneralizedRCNN"):
        count_detector_flops(build_model(get_config(R50.format("_nl"), options)), 64, 64)
