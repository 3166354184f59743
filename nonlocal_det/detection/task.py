"""Detection as a task of the engine: instances with boxes, masks and keypoints, on data in COCO's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from torch import nn

from nonlocal_det.data.cache import ensure_made
from nonlocal_det.detection import checks, config, cost, loaders, registration
from nonlocal_det.detection.annotations.documents import release_documents
from nonlocal_det.detection.evaluation import COCOEvaluator
from nonlocal_det.detection.probes import probe
from nonlocal_det.engine.task import Task
from nonlocal_det.errors import DatasetError

#: What holds one tensor, by its name.
_TENSOR_HOLDERS = {kind.__name__: kind for kind in (Boxes, RotatedBoxes, BitMasks, Keypoints)}


class Detection(Task):
    """Training and evaluation of Detectron2's detectors; :class:`Task` says what each member does."""

    name = "detection"
    architectures = frozenset({"GeneralizedRCNN", "RetinaNet"})

    add_keys = staticmethod(config.add_keys)
    register_datasets = staticmethod(registration.apply_datasets)
    check_settings = staticmethod(checks.check_settings)
    check_parts = staticmethod(checks.check_parts)
    check_classes = staticmethod(checks.check_classes)
    check_data = staticmethod(checks.check_data)
    release_data = staticmethod(release_documents)
    build_train_loader = staticmethod(loaders.build_train_loader)
    build_test_loader = staticmethod(loaders.build_test_loader)
    build_validation_loader = staticmethod(loaders.build_validation_loader)
    count_flops = staticmethod(cost.count_detector_flops)

    def build_evaluator(self, cfg: CfgNode, dataset: str, folder: str) -> DatasetEvaluator:
        sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
        return COCOEvaluator(dataset, config.predictions(cfg), output_dir=folder, kpt_oks_sigmas=sigmas)

    def scores(self, cfg: CfgNode) -> tuple[str, ...]:
        predicted = config.predictions(cfg)
        return tuple(f"{kind}/AP" for kind in ("segm", "keypoints", "bbox") if kind in predicted)

    def augment(self, cfg: CfgNode, model: nn.Module) -> nn.Module | None:
        return GeneralizedRCNNWithTTA(cfg, model) if cfg.TEST.AUG.ENABLED else None

    def state(self, model: nn.Module) -> dict[str, Any]:
        # RetinaNet's and FCOS's moving average of positive anchors, which is no buffer.
        return {"loss_normalizer": vars(model).get("loss_normalizer")}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        if state.get("loss_normalizer") is not None:
            model.loss_normalizer = state["loss_normalizer"]

    def encode(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, PolygonMasks):
            return {"is": "PolygonMasks", "polygons": value.polygons}
        if isinstance(value, Instances):
            size, fields = list(value.image_size), value.get_fields()
            return {"is": "Instances", "image_size": size, "fields": fields}
        name = type(value).__name__
        return {"is": name, "tensor": value.tensor} if _TENSOR_HOLDERS.get(name) is type(value) else None

    def decode(self, value: Mapping[str, Any]) -> Any:
        if value["is"] == "PolygonMasks":
            return PolygonMasks(value["polygons"])
        if value["is"] == "Instances":
            return Instances(tuple(value["image_size"]), **value["fields"])
        holder = _TENSOR_HOLDERS.get(value["is"])
        return None if holder is None else holder(value["tensor"])

    def probe(self, cfg: CfgNode, folder: Path) -> dict[str, Any]:
        name = cfg.DATASETS.TEST[0]
        inner = name if len(cfg.DATASETS.TEST) > 1 else ""
        predictions = folder / "inference" / inner / "coco_instances_results.json"
        annotations = Path(MetadataCatalog.get(name).get("json_file", ""))
        if predictions.is_file():
            ensure_made(name)
        if not (predictions.is_file() and annotations.is_file()):
            return {}
        try:
            return probe(annotations, predictions)
        except (OSError, ValueError, LookupError, TypeError):
            raise DatasetError(f"{predictions} is damaged") from None
