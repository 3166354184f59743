"""The keypoint head: where its blocks go, their channels, and RoI batches of every size."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.roi_heads import build_keypoint_head
from detectron2.structures import Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from torch import nn

from nonlocal_det import ConfigError
from nonlocal_det.detection.modeling.keypoint_head import NonLocalKeypointHead
from nonlocal_det.layers import NonLocalBlock
from nonlocal_det.modeling.block import BlockOptions

HEAD = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head.yaml"


def head_of(cfg, channels=16):
    return build_keypoint_head(cfg, ShapeSpec(channels=channels, height=14, width=14))


def rois(count, training):
    instances = Instances((64, 64))
    boxes = Boxes(torch.tensor([[4.0, 4.0, 40.0, 50.0]]).repeat(count, 1))
    if training:
        instances.proposal_boxes = boxes
        instances.gt_keypoints = Keypoints(torch.full((count, 17, 3), 20.0))
    else:
        instances.pred_boxes = boxes
    return instances


def test_a_block_after_every_second_conv(small_config):
    head = head_of(small_config(HEAD))
    expected = []
    for index in range(1, 9):
        expected += [f"conv_fcn{index}", f"conv_fcn_relu{index}"]
        if index % 2 == 0:
            expected.append(f"non_local_{index}")
    assert [name for name, _ in head.named_children()] == [*expected, "score_lowres"]
    # CONV_DIMS of the small config is 12, 12, 16, 16, 16, 16, 8, 8
    blocks = {name: block for name, block in head.named_children() if isinstance(block, NonLocalBlock)}
    assert {name: (block.in_channels, block.inter_channels) for name, block in blocks.items()} == {
        "non_local_2": (12, 6),
        "non_local_4": (16, 8),
        "non_local_6": (16, 8),
        "non_local_8": (8, 4),
    }


@pytest.mark.parametrize("every", [1, 3, 8])
def test_every_k(small_config, every):
    head = head_of(small_config(HEAD, "MODEL.NONLOCAL.KEYPOINT_HEAD", every))
    names = [name for name, block in head.named_children() if isinstance(block, NonLocalBlock)]
    assert names == [f"non_local_{index}" for index in range(every, 9, every)]


def test_names_of_the_convs_stay(small_config):
    cfg = small_config(HEAD)
    stock = small_config("COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x.yaml")
    added = set(head_of(cfg).state_dict()) - set(head_of(stock).state_dict())
    assert set(head_of(stock).state_dict()) <= set(head_of(cfg).state_dict())
    assert all(name.startswith("non_local_") for name in added)


@pytest.mark.parametrize("norm", ["", "BN", "GN", "LN", "naiveSyncBN"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_any_number_of_rois(small_config, norm, count):
    torch.manual_seed(0)
    cfg = small_config(HEAD, "MODEL.NONLOCAL.NORM", norm)
    head = head_of(cfg)
    features = torch.rand(count, 16, 14, 14, requires_grad=True)
    with EventStorage():
        loss = head(features, [rois(count, training=True)])["loss_keypoint"]
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())

    head.eval()
    with torch.no_grad():
        (instances,) = head(features.detach(), [rois(count, training=False)])
    assert instances.pred_keypoints.shape == (count, 17, 3)


def test_starts_as_the_stock_head(small_config):
    torch.manual_seed(0)
    stock = head_of(small_config("COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x.yaml"))
    for norm in ("", "BN"):
        head = head_of(small_config(HEAD, "MODEL.NONLOCAL.NORM", norm))
        head.load_state_dict(stock.state_dict(), strict=False)
        features = torch.rand(3, 16, 14, 14)
        torch.testing.assert_close(head.layers(features), stock.layers(features), rtol=0, atol=0)


def test_from_python_without_a_config():
    shape = ShapeSpec(channels=8, height=14, width=14)
    head = NonLocalKeypointHead(
        shape, num_keypoints=5, conv_dims=[8] * 4, nonlocal_every=4, nonlocal_options=BlockOptions(norm="LN")
    )
    assert isinstance(head.non_local_4.w_z.norm, nn.GroupNorm)
    assert head.layers(torch.rand(2, 8, 14, 14)).shape == (2, 5, 56, 56)
    for every in (0, 5, -1):
        with pytest.raises(ConfigError, match=f"KEYPOINT_HEAD is {every}: no block.*1 to 4"):
            NonLocalKeypointHead(shape, num_keypoints=5, conv_dims=[8] * 4, nonlocal_every=every)


def test_torchscript_of_the_layers(small_config):
    torch.manual_seed(0)
    head = head_of(small_config(HEAD)).eval()
    for block in head.modules():
        if isinstance(block, NonLocalBlock):
            nn.init.normal_(block.w_z.weight, std=0.1)
    layers = nn.Sequential(*head)
    scripted = torch.jit.script(layers)
    for count in (0, 1, 7):
        features = torch.rand(count, 16, 14, 14)
        torch.testing.assert_close(scripted(features), layers(features), rtol=1e-4, atol=1e-5)
