"""The loader of data to evaluate on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from torch.utils.data import DataLoader

from nonlocal_det.data.checks import check_picture_paths
from nonlocal_det.data.images import PictureMapper

__all__ = ["build_eval_loader"]


def build_eval_loader(
    cfg: CfgNode, dataset_name: str, mapper: Callable[[Any], Any] | None = None
) -> DataLoader:
    """Return Detectron2's loader, which reads no file that it should not.

    Args:
        cfg: the config.
        dataset_name: a registered data set.
        mapper: makes a sample of a dataset dict; Detectron2's for evaluation by default.

    Raises:
        ConfigError: a picture lies outside the image folder (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT).
    """
    parts = build_detection_test_loader.from_config(cfg, dataset_name, mapper=mapper)
    check_picture_paths(cfg, [dataset_name], parts["dataset"])
    parts["mapper"] = PictureMapper(parts["mapper"])
    return build_detection_test_loader(**parts)
