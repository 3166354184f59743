"""The keys of detection, and which of them hold what depends on the architecture."""

from __future__ import annotations

from detectron2.config import CfgNode

__all__ = ["KEYPOINT_HEAD", "add_keys", "detector_key", "detector_node", "predictions"]

KEYPOINT_HEAD = "NonLocalKeypointHead"


def add_keys(cfg: CfgNode) -> None:
    """Add the keys of detection.

    Args:
        cfg: a config with MODEL.NONLOCAL, changed in place.
    """
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
    return (
        "bbox",
        *(("segm",) if cfg.MODEL.MASK_ON else ()),
        *(("keypoints",) if cfg.MODEL.KEYPOINT_ON else ()),
    )
