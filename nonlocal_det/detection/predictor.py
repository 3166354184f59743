"""A trained detector that takes a picture, and the names of what it finds."""

from __future__ import annotations

import sys

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog, transforms
from detectron2.data.catalog import Metadata
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from detectron2.structures import Instances

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.detection.config import detector_node
from nonlocal_det.errors import UsageError, one_line
from nonlocal_det.modeling.build import build_model


class Predictor:
    """A trained model that takes a BGR picture, as Detectron2's ``DefaultPredictor`` does.

    It differs in that it refuses weights that do not fit, resizes the thinnest picture to at least one
    pixel, and tells the size that the network got.

    Args:
        cfg: config with MODEL.WEIGHTS.

    Attributes:
        model: the model, in eval mode.
        metadata: names of classes and keypoints, as far as they are known and fit the model.

    Raises:
        CheckpointError: the weights cannot be used.
        ConfigError: the model cannot be built.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg = cfg
        self.model = build_model(cfg).eval()
        checkpointer = NonLocalCheckpointer(self.model)
        checkpointer.load(cfg.MODEL.WEIGHTS)
        if untrained := len(checkpointer.report.untrained):
            reason = f"{untrained} tensors are not in {cfg.MODEL.WEIGHTS} and hold random values"
            print(f"warning: {reason}: what is drawn means nothing", file=sys.stderr)
        self.metadata = _fitting_metadata(cfg)

    def __call__(self, image: np.ndarray) -> tuple[Instances, tuple[int, int]]:
        """Detect.

        Args:
            image: array (H, W, 3), uint8, BGR.

        Returns:
            The instances on the CPU, in the picture's coordinates, and the (height, width) of the network's
            input before its padding.

        Raises:
            UsageError: the model predicts no instances.
        """
        height, width = image.shape[:2]
        if self.cfg.INPUT.FORMAT == "RGB":
            image = image[:, :, ::-1]
        if self.cfg.INPUT.MIN_SIZE_TEST > 0:
            new_height, new_width = transforms.ResizeShortestEdge.get_output_shape(
                height, width, self.cfg.INPUT.MIN_SIZE_TEST, self.cfg.INPUT.MAX_SIZE_TEST
            )
            resize = transforms.ResizeTransform(height, width, max(1, new_height), max(1, new_width))
            image = resize.apply_image(np.ascontiguousarray(image))
        tensor = torch.as_tensor(image.astype("float32").transpose(2, 0, 1))
        with torch.no_grad():
            output = self.model([{"image": tensor, "height": height, "width": width}])[0]
        if "instances" not in output:
            raise UsageError(
                f"MODEL.META_ARCHITECTURE {self.cfg.MODEL.META_ARCHITECTURE} predicts no instances; use a "
                "config of Mask R-CNN, Keypoint R-CNN or RetinaNet"
            )
        return output["instances"].to("cpu"), image.shape[:2]


def _fitting_metadata(cfg: CfgNode) -> Metadata:
    """Return the names that fit the model, from the first test set; what does not is left out, and said."""
    metadata = Metadata()
    if not cfg.DATASETS.TEST:
        return metadata
    name = cfg.DATASETS.TEST[0]
    source = MetadataCatalog.get(name)
    if source.get("thing_dataset_id_to_contiguous_id") is None and name in DatasetCatalog:
        try:
            DatasetCatalog.get(name)  # the JSON file has the names and ids
        except Exception as error:
            if source.get("thing_classes") is None:
                reason = f"{name} cannot be loaded: {one_line(error)}"
                print(f"class names unknown, numbers are shown: {reason}")
                return metadata
    classes = detector_node(cfg).NUM_CLASSES
    names = source.get("thing_classes") or []
    if len(names) == classes:
        metadata.thing_classes = names
        ids = source.get("thing_dataset_id_to_contiguous_id")
        if ids is None:  # COCO's persons where COCO is not installed
            coco = {category["name"]: category["id"] for category in COCO_CATEGORIES}
            ids = {coco[n]: index for index, n in enumerate(names)} if set(names) <= set(coco) else {}
        metadata.thing_dataset_id_to_contiguous_id = ids
    else:
        print(
            f"the model has {classes} classes and {name} (DATASETS.TEST) {len(names)}: numbers are shown, "
            "and category_id counts from 0"
        )
    keypoints = source.get("keypoint_names")
    if cfg.MODEL.KEYPOINT_ON and keypoints and len(keypoints) == cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS:
        metadata.keypoint_names = keypoints
        metadata.keypoint_connection_rules = source.get("keypoint_connection_rules") or []
    return metadata
