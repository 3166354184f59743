"""The stem of the authors' nets, whose max pool is not padded."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, build_model

from nonlocal_det.modeling.stem import UnpaddedPoolStem, unpad_stem_pool


@pytest.mark.parametrize("size", [(64, 96), (62, 33), (7, 8)])
def test_cells_are_those_of_a_pool_without_padding(size):
    stem = UnpaddedPoolStem(3, 8, norm="BN").eval()
    with torch.no_grad():
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
        found, middle = stem(x), stem.conv1(x).relu()
    height, width = middle.shape[-2:]
    for y in range((height - 3) // 2 + 1):
        for x in range((width - 3) // 2 + 1):
            window = middle[:, :, 2 * y : 2 * y + 3, 2 * x : 2 * x + 3]
            assert torch.equal(found[:, :, y, x], window.amax((2, 3)))
    if size == (64, 96):  # as a feature pyramid needs it
        assert found.shape[-2:] == (16, 24)


@pytest.mark.parametrize(
    "name", ["build_resnet_backbone", "build_resnet_fpn_backbone", "build_retinanet_resnet_fpn_backbone"]
)
def test_builders_differ_in_the_stem_alone(small_config, name):
    cfg = small_config("Ablations/retinanet_R_50_FPN_1x.yaml")
    if name == "build_resnet_backbone":
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res4"]
    shape = ShapeSpec(channels=3)
    stock = BACKBONE_REGISTRY.get(name)(cfg, shape)
    ours = BACKBONE_REGISTRY.get(f"{name}_unpadded_pool")(cfg, shape)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert sum(isinstance(module, UnpaddedPoolStem) for module in ours.modules()) == 1
    frozen = [key for key, value in ours.named_parameters() if not value.requires_grad]
    assert frozen == [key for key, value in stock.named_parameters() if not value.requires_grad]


def test_a_model_is_changed_in_place(small_config):
    model = build_model(small_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"))
    weight = model.backbone.bottom_up.stem.conv1.weight
    assert unpad_stem_pool(model) is model
    assert isinstance(model.backbone.bottom_up.stem, UnpaddedPoolStem)
    assert model.backbone.bottom_up.stem.conv1.weight is weight
    assert model.backbone.size_divisibility == 32
    with pytest.raises(ValueError, match="Linear has no ResNet"):
        unpad_stem_pool(torch.nn.Linear(1, 1))
