"""Non-local blocks inside Detectron2's backbones; importing this registers the builders."""

from nonlocal_det.modeling import backbone, fpn, stem  # noqa: F401
from nonlocal_det.modeling.build import build_on_meta

__all__ = ["build_on_meta"]
