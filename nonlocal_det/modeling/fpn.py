"""A feature pyramid on a ResNet that ends before res5, as small experiments use it."""

from __future__ import annotations

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.fpn import build_resnet_fpn_backbone


@BACKBONE_REGISTRY.register()
def build_short_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build Detectron2's ResNet with FPN, whose top level is pooled from whatever level is the last.

    Detectron2's own pools p6 from p5, and fails on a pyramid without p5. With FPN.IN_FEATURES res2 to res4
    this makes p2 to p4, and p5 by a max pool of p4. MODEL.RESNETS.OUT_FEATURES ends with the same stage.
    """
    backbone = build_resnet_fpn_backbone(cfg, input_shape)
    backbone.top_block.in_feature = f"p{cfg.MODEL.FPN.IN_FEATURES[-1].removeprefix('res')}"
    return backbone
