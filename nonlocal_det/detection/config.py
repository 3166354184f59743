"""The keys of detection, and which of them hold what depends on the architecture."""

from __future__ import annotations

from typing import Any

from detectron2.config import CfgNode

from nonlocal_det.config.keys import STAGES, WRAPPER

KEYPOINT_HEAD = "NonLocalKeypointHead"
_STOCK_KEYPOINT_HEAD = "KRCNNConvDeconvUpsampleHead"


def add_keys(cfg: CfgNode) -> None:
    """Add the keys of detection to a config with MODEL.NONLOCAL, in place."""
    # A block after every k convs of the keypoint head; 0 is none. Needs
    # MODEL.ROI_KEYPOINT_HEAD.NAME "NonLocalKeypointHead".
    cfg.MODEL.NONLOCAL.KEYPOINT_HEAD = 0

    # Whether annotation files may name pictures outside their image folder, by "..", an absolute path, an
    # address or a symbolic link.
    cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT = False


def detector_key(cfg: CfgNode) -> str:
    """Return the key of the node with the number of classes and the score threshold."""
    return "MODEL.RETINANET" if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else "MODEL.ROI_HEADS"


def detector_node(cfg: CfgNode) -> CfgNode:
    """Return that node: NUM_CLASSES and SCORE_THRESH_TEST are in it."""
    return cfg.MODEL[detector_key(cfg).removeprefix("MODEL.")]


def predictions(cfg: CfgNode) -> tuple[str, ...]:
    """Return what the model predicts, as COCO names it: "bbox", and "segm" and "keypoints" if on."""
    # Named, not found from the predictions: a model that finds nothing yet still gets its score, NaN.
    kinds = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    return tuple(kind for kind, on in kinds.items() if on)


def keys_without_blocks(cfg: CfgNode) -> dict[str, Any]:
    """Return the keys, with their values, that make the same detector without its blocks."""
    node = cfg.MODEL.NONLOCAL
    changes: dict[str, Any] = {f"MODEL.NONLOCAL.{stage}": [] for stage in STAGES if len(node[stage])}
    if cfg.MODEL.BACKBONE.NAME == WRAPPER:
        changes["MODEL.BACKBONE.NAME"] = node.BACKBONE
    if cfg.MODEL.ROI_KEYPOINT_HEAD.NAME == KEYPOINT_HEAD:
        changes["MODEL.ROI_KEYPOINT_HEAD.NAME"] = _STOCK_KEYPOINT_HEAD
        changes["MODEL.NONLOCAL.KEYPOINT_HEAD"] = 0
    return changes
