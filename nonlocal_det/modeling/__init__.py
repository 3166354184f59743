"""Non-local blocks inside Detectron2's backbones and heads; importing this registers both."""

from __future__ import annotations

from nonlocal_det.modeling.backbone import build_nonlocal_backbone
from nonlocal_det.modeling.block import BlockOptions, StageNonLocalBlock
from nonlocal_det.modeling.fpn import build_short_resnet_fpn_backbone
from nonlocal_det.modeling.stem import UnpaddedPoolStem, unpad_stem_pool

__all__ = [
    "BlockOptions",
    "StageNonLocalBlock",
    "UnpaddedPoolStem",
    "build_nonlocal_backbone",
    "build_short_resnet_fpn_backbone",
    "unpad_stem_pool",
]
