"""The loaders of detection: what Detectron2 loads, in an order that can go on, and nothing from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.utils import comm
from torch.utils.data import DataLoader

from nonlocal_det.config.messages import config_error
from nonlocal_det.data.loader import TrainLoader, named_reason
from nonlocal_det.data.order import EpochOrder
from nonlocal_det.detection.annotations.documents import lend_document, release_documents, take_document
from nonlocal_det.detection.mapper import PictureMapper
from nonlocal_det.media.folders import outside
from nonlocal_det.upstream import annotation_files_from

logger = logging.getLogger(__name__)


def build_train_loader(cfg: CfgNode, seed: int) -> TrainLoader:
    """Return the loader for what Detectron2's ``build_detection_train_loader(cfg)`` loads.

    Order and augmentation depend on ``seed``.

    Raises:
        TypeError: a data set is a stream, which has no order, or the sampler is not known.
        ConfigError: images without a size are to be grouped by it (DATALOADER.ASPECT_RATIO_GROUPING), or a
            picture lies outside its image folder (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT).
    """
    evaluated = _test_files(cfg)

    def read(path: str) -> dict[str, Any]:
        # PreciseBN makes a second loader of the training data.
        needed = path in evaluated or cfg.TEST.PRECISE_BN.ENABLED
        return lend_document(path) if needed else take_document(path)

    with annotation_files_from(read):
        parts = build_detection_train_loader.from_config(cfg)
    dataset, processes = parts["dataset"], comm.get_world_size()
    _check_picture_paths(cfg, cfg.DATASETS.TRAIN, dataset)
    try:
        groups = [int(x["width"] > x["height"]) for x in dataset] if parts["aspect_ratio_grouping"] else None
    except KeyError as error:
        what = f"{cfg.DATASETS.TRAIN} has an image without {error}; give every image its size, or write False"
        raise config_error("DATALOADER.ASPECT_RATIO_GROUPING", True, what) from error
    return TrainLoader(
        dataset,
        PictureMapper(parts["mapper"]),
        EpochOrder.like(parts["sampler"], len(dataset)),
        seed=seed,
        batch_size=parts["total_batch_size"] // processes,
        groups=groups,
        check=check_sample,
        num_workers=parts["num_workers"],
        rank=comm.get_rank(),
        processes=processes,
        max_bad_fraction=cfg.DATALOADER.MAX_BAD_FRACTION,
    )


def check_sample(content: Any) -> None:
    """Refuse annotations that would spoil the weights."""
    instances = content.get("instances") if isinstance(content, dict) else None
    for field in ("gt_boxes", "gt_keypoints"):
        if instances is not None and instances.has(field):
            values = getattr(instances.get(field), "tensor", None)
            if values is not None and not torch.isfinite(values).all():
                raise ValueError(f"{field} has numbers that are not finite")


def build_test_loader(cfg: CfgNode, dataset: str) -> DataLoader:
    """Return Detectron2's loader, which reads no file that it should not.

    Raises:
        ConfigError: a picture lies outside the image folder (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT).
    """
    release_documents(but=_test_files(cfg))  # others were for training
    with annotation_files_from(lend_document):
        parts = build_detection_test_loader.from_config(cfg, dataset)
    _check_picture_paths(cfg, [dataset], parts["dataset"])
    parts["mapper"] = PictureMapper(parts["mapper"])
    return build_detection_test_loader(**parts)


def build_validation_loader(cfg: CfgNode, dataset: str) -> DataLoader | None:
    """Return the loader of the evaluation with ground truth, resized as there; None without annotations."""
    mapper = DatasetMapper(**{**DatasetMapper.from_config(cfg, is_train=False), "is_train": True})
    with annotation_files_from(lend_document):
        safe = partial(_mapped_or_reason, PictureMapper(mapper))
        parts = build_detection_test_loader.from_config(cfg, dataset, mapper=safe)
    objects = [
        obj for record in parts["dataset"] for obj in record.get("annotations", ()) if not obj.get("iscrowd")
    ]
    if not objects:
        logger.info("%s has no annotations to compute a validation loss with", dataset)
        return None
    if any(isinstance(obj.get("segmentation"), dict) for obj in objects):
        # INPUT.MASK_FORMAT is that of the training data. An RLE cannot become polygons.
        mapper.instance_mask_format = "bitmask"
    return build_detection_test_loader(**parts)


def _test_files(cfg: CfgNode) -> set[str | None]:
    """Return the annotation files that every evaluation needs again."""
    return {MetadataCatalog.get(name).get("json_file") for name in cfg.DATASETS.TEST}


def _mapped_or_reason(mapper: Callable[[Any], Any], record: Mapping[str, Any]) -> Any:
    """Map an image, or return one line that says why it cannot be."""
    try:
        return mapper(record)
    except MemoryError:
        raise
    except Exception as error:  # impossible annotations raise nearly every type
        return ": ".join(named_reason(record, error))


def _check_picture_paths(cfg: CfgNode, names: Sequence[str], images: Sequence[Mapping[str, Any]]) -> None:
    """Refuse pictures outside the image folders of their data sets, as far as those are known."""
    roots = [MetadataCatalog.get(name).get("image_root") for name in names]
    if cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT or not isinstance(images, list) or None in roots:
        return
    named = [image for image in images if isinstance(image.get("file_name"), str)]
    found = outside([image["file_name"] for image in named], roots)
    if found:
        first = named[found[0]]
        raise config_error(
            "DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT",
            False,
            f"image {first.get('image_id')} of {', '.join(names)} leads out of the image folder "
            f"{', '.join(map(str, roots))}: {first['file_name']} ({len(found)} of {len(named)} images); "
            "correct file_name, or write True",
        )
