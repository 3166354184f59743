"""Detection as a task of the engine: instances with boxes, masks and keypoints, on data in COCO's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from torch import nn
from torch.utils.data import DataLoader

from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.detection import checks, config
from nonlocal_det.detection.evaluation import COCOEvaluator
from nonlocal_det.detection.loaders import build_test_loader, build_train_loader, build_validation_loader
from nonlocal_det.detection.probes import probe
from nonlocal_det.detection.registration import apply_datasets
from nonlocal_det.engine.task import Task

__all__ = ["Detection"]

#: What holds one tensor, by its name.
_TENSOR_HOLDERS = {kind.__name__: kind for kind in (Boxes, RotatedBoxes, BitMasks, Keypoints)}


class Detection(Task):
    """Training and evaluation of Detectron2's detectors."""

    name = "detection"
    architectures = frozenset({"GeneralizedRCNN", "RetinaNet"})

    def add_keys(self, cfg: CfgNode) -> None:  # noqa: D102
        config.add_keys(cfg)

    def register_datasets(self, cfg: CfgNode, folders: Sequence[Path], user_keys: set[str]) -> None:  # noqa: D102
        apply_datasets(cfg, folders, user_keys)

    def check_settings(self, cfg: CfgNode) -> None:  # noqa: D102
        checks.check_settings(cfg)

    def check_parts(self, cfg: CfgNode, *, training: bool) -> None:  # noqa: D102
        checks.check_parts(cfg, training=training)

    def check_classes(self, cfg: CfgNode, key: str, name: str) -> None:  # noqa: D102
        checks.check_classes(cfg, key, name)

    def check_data(self, cfg: CfgNode, *, training: bool) -> None:  # noqa: D102
        checks.check_data(cfg, training=training)

    def build_train_loader(self, cfg: CfgNode, seed: int) -> TrainLoader:  # noqa: D102
        return build_train_loader(cfg, seed)

    def build_test_loader(self, cfg: CfgNode, dataset: str) -> DataLoader:  # noqa: D102
        return build_test_loader(cfg, dataset)

    def build_validation_loader(self, cfg: CfgNode, dataset: str) -> DataLoader | None:  # noqa: D102
        return build_validation_loader(cfg, dataset)

    def build_evaluator(self, cfg: CfgNode, dataset: str, folder: str) -> DatasetEvaluator:  # noqa: D102
        sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
        return COCOEvaluator(dataset, config.predictions(cfg), output_dir=folder, kpt_oks_sigmas=sigmas)

    def scores(self, cfg: CfgNode) -> tuple[str, ...]:  # noqa: D102
        predicted = config.predictions(cfg)
        return tuple(f"{kind}/AP" for kind in ("segm", "keypoints", "bbox") if kind in predicted)

    def augment(self, cfg: CfgNode, model: nn.Module) -> nn.Module | None:  # noqa: D102
        return GeneralizedRCNNWithTTA(cfg, model) if cfg.TEST.AUG.ENABLED else None

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Return RetinaNet's and FCOS's moving average of positive anchors, which is no buffer."""
        return {"loss_normalizer": vars(model).get("loss_normalizer")}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:  # noqa: D102
        if state.get("loss_normalizer") is not None:
            model.loss_normalizer = state["loss_normalizer"]

    def encode(self, value: Any) -> dict[str, Any] | None:  # noqa: D102
        if isinstance(value, PolygonMasks):
            return {"is": "PolygonMasks", "polygons": value.polygons}
        if isinstance(value, Instances):
            size, fields = list(value.image_size), value.get_fields()
            return {"is": "Instances", "image_size": size, "fields": fields}
        name = type(value).__name__
        return {"is": name, "tensor": value.tensor} if _TENSOR_HOLDERS.get(name) is type(value) else None

    def decode(self, value: Mapping[str, Any]) -> Any:  # noqa: D102
        if value["is"] == "PolygonMasks":
            return PolygonMasks(value["polygons"])
        if value["is"] == "Instances":
            return Instances(tuple(value["image_size"]), **value["fields"])
        holder = _TENSOR_HOLDERS.get(value["is"])
        return None if holder is None else holder(value["tensor"])

    def count_flops(self, model: nn.Module, height: int, width: int) -> Any:  # noqa: D102
        from nonlocal_det.detection.cost import count_detector_flops

        return count_detector_flops(model, height, width)

    def probe(self, cfg: CfgNode, folder: Path) -> dict[str, Any]:  # noqa: D102
        name = cfg.DATASETS.TEST[0]
        inner = name if len(cfg.DATASETS.TEST) > 1 else ""
        predictions = folder / "inference" / inner / "coco_instances_results.json"
        annotations = Path(MetadataCatalog.get(name).get("json_file", ""))
        if not (predictions.is_file() and annotations.is_file()):
            return {}
        try:
            return probe(annotations, predictions)
        except (OSError, ValueError, LookupError, TypeError):
            raise DatasetError(f"{predictions} is damaged") from None
