import pytest

pytest.importorskip("detectron2")

from nonlocal_det import ConfigError, get_config
from nonlocal_det.benchmark.detector import compare_detectors, without_blocks

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x{}.yaml"
KEYPOINT = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x{}.yaml"


@pytest.mark.parametrize(
    ("with_blocks", "baseline"),
    [
        (MASK.format("_nl"), MASK.format("")),
        (KEYPOINT.format("_nl_head_backbone"), KEYPOINT.format("")),
        ("Ablations/retinanet_R_50_FPN_1x_nl.yaml", "Ablations/retinanet_R_50_FPN_1x.yaml"),
    ],
)
def test_without_blocks_is_the_baseline(with_blocks, baseline):
    cfg = get_config(with_blocks)
    expected = get_config(baseline)
    before = cfg.clone()
    made = without_blocks(cfg)
    assert cfg == before
    expected.MODEL.NONLOCAL = made.MODEL.NONLOCAL  # the stock builders do not read it
    expected.OUTPUT_DIR = made.OUTPUT_DIR
    assert made == expected


def test_without_blocks_needs_blocks():
    with pytest.raises(ConfigError, match="nothing to compare"):
        without_blocks(get_config(MASK.format("")))


def test_compare(small_options):
    cfg = get_config(KEYPOINT.format("_nl_head_backbone"), small_options({"TEST.DETECTIONS_PER_IMAGE": 7}))
    cost = compare_detectors(cfg, without_blocks(cfg), 64, 64, pairs=2)
    # C = 64 in the small res4 and C = 16 in the head: three convolutions into C', one back.
    block = 4 * 64 * 32 + 3 * 32 + 64
    head_block = 4 * 16 * 8 + 3 * 8 + 16
    assert cost.parameters - cost.baseline_parameters == block + 4 * head_block
    assert cost.flops.total > cost.baseline_flops.total
    assert cost.detections == 7
    for step in (cost.training, cost.inference):
        assert step.time.rounds == 2
        assert step.seconds > 0
        assert step.memory is None or step.memory > 4 * cost.parameters
    if cost.training.memory:  # gradients and momentum besides the weights
        assert cost.training.memory > 8 * cost.parameters
