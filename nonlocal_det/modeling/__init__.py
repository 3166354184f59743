"""Non-local blocks inside Detectron2's backbones and heads; importing this registers both."""

from __future__ import annotations

from nonlocal_det.modeling.backbone import build_nonlocal_backbone
from nonlocal_det.modeling.block import BlockOptions, StageNonLocalBlock
from nonlocal_det.modeling.keypoint_head import NonLocalKeypointHead

__all__ = ["BlockOptions", "NonLocalKeypointHead", "StageNonLocalBlock", "build_nonlocal_backbone"]
