"""The loader of data to evaluate on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader

from nonlocal_det.data.checks import check_picture_paths
from nonlocal_det.data.images import PictureMapper

__all__ = ["build_eval_loader"]


def build_eval_loader(cfg: CfgNode, dataset_name: str) -> Iterable[list[dict[str, Any]]]:
    """Return Detectron2's loader, which reads no file that it should not.

    Args:
        cfg: the config.
        dataset_name: a registered data set.

    Raises:
        ConfigError: a picture lies outside the image folder (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT).
    """
    parts = build_detection_test_loader.from_config(cfg, dataset_name)
    check_picture_paths(cfg, [dataset_name], parts["dataset"])
    parts["mapper"] = PictureMapper(parts["mapper"])
    return build_detection_test_loader(**parts)
