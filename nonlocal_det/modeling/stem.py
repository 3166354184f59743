"""The stem of the authors' nets and of Caffe's: a max pool without padding at the top and left.

Detectron2's stem pads its max pool by 1 on every side, so each of its cells lies one pixel of the stem's
conv further up and left. Weights trained without the padding see features that are shifted by that pixel.
"""

from __future__ import annotations

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.fpn import build_resnet_fpn_backbone, build_retinanet_resnet_fpn_backbone
from detectron2.modeling.backbone.resnet import BasicStem, ResNet, build_resnet_backbone
from torch import Tensor, nn


class UnpaddedPoolStem(BasicStem):
    """Detectron2's stem with its max pool not padded.

    The last window, which the border cuts off, counts too, so that a side of H pixels, H a multiple of 32,
    gives H / 4 rows, as feature pyramids need. All other cells are those of a pool that drops it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Make the input of res2, [B, C, ceil((ceil(H / 2) - 1) / 2), ...], of images [B, 3, H, W]."""
        return F.max_pool2d(F.relu_(self.conv1(x)), kernel_size=3, stride=2, ceil_mode=True)


def unpad_stem_pool(module: nn.Module) -> nn.Module:
    """Take the padding out of the stem's max pool of every ResNet in a module; return the module.

    Raises:
        ValueError: there is no ResNet with Detectron2's basic stem.
    """
    resnets = [part for part in module.modules() if isinstance(part, ResNet)]
    found = [resnet for resnet in resnets if isinstance(resnet.stem, BasicStem)]
    if not found:
        raise ValueError(f"{type(module).__name__} has no ResNet with a BasicStem")
    for resnet in found:
        stem = UnpaddedPoolStem(resnet.stem.in_channels, resnet.stem.out_channels, norm="")
        stem.conv1 = resnet.stem.conv1
        resnet.stem = stem
    return module


@BACKBONE_REGISTRY.register()
def build_resnet_backbone_unpadded_pool(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build Detectron2's ResNet with :class:`UnpaddedPoolStem`."""
    return unpad_stem_pool(build_resnet_backbone(cfg, input_shape))


@BACKBONE_REGISTRY.register()
def build_resnet_fpn_backbone_unpadded_pool(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build Detectron2's ResNet with FPN with :class:`UnpaddedPoolStem`."""
    return unpad_stem_pool(build_resnet_fpn_backbone(cfg, input_shape))


@BACKBONE_REGISTRY.register()
def build_retinanet_resnet_fpn_backbone_unpadded_pool(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build Detectron2's backbone of RetinaNet with :class:`UnpaddedPoolStem`."""
    return unpad_stem_pool(build_retinanet_resnet_fpn_backbone(cfg, input_shape))


#: Detectron2's builder -> ours, which makes the same with an unpadded pool in the stem.
UNPADDED = {
    name: f"{name}_unpadded_pool"
    for name in ("build_resnet_backbone", "build_resnet_fpn_backbone", "build_retinanet_resnet_fpn_backbone")
}
