"""What can be found wrong before a model is built: data sets, weights, output folder, and CPU limits."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import (
    ANCHOR_GENERATOR_REGISTRY,
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    PROPOSAL_GENERATOR_REGISTRY,
    ROI_BOX_HEAD_REGISTRY,
    ROI_HEADS_REGISTRY,
    ROI_KEYPOINT_HEAD_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    RPN_HEAD_REGISTRY,
)
from detectron2.utils.file_io import PathManager

from nonlocal_det.checkpoint.checkpointer import find_weights
from nonlocal_det.config import ConfigError, check_choice

__all__ = ["check_run", "check_training"]

SYNC_NORMS = ("SyncBN", "nnSyncBN")
_REGISTRIES = {
    "MODEL.META_ARCHITECTURE": META_ARCH_REGISTRY,
    "MODEL.BACKBONE.NAME": BACKBONE_REGISTRY,
    "MODEL.ANCHOR_GENERATOR.NAME": ANCHOR_GENERATOR_REGISTRY,
}
_REGISTRIES_OF_RCNN = {
    "MODEL.PROPOSAL_GENERATOR.NAME": PROPOSAL_GENERATOR_REGISTRY,
    "MODEL.RPN.HEAD_NAME": RPN_HEAD_REGISTRY,
    "MODEL.ROI_HEADS.NAME": ROI_HEADS_REGISTRY,
    "MODEL.ROI_BOX_HEAD.NAME": ROI_BOX_HEAD_REGISTRY,
    "MODEL.ROI_MASK_HEAD.NAME": ROI_MASK_HEAD_REGISTRY,
    "MODEL.ROI_KEYPOINT_HEAD.NAME": ROI_KEYPOINT_HEAD_REGISTRY,
}
# Names that are in no registry: C4's ROI heads have no box head.
_UNREGISTERED = {
    "MODEL.PROPOSAL_GENERATOR.NAME": ["PrecomputedProposals"],
    "MODEL.ROI_BOX_HEAD.NAME": [""],
}
# What Detectron2 takes, without the weighted samplers: our loader knows no order for them. Other values it
# finds late, or takes for "none".
_CHOICES_IN_TRAINING = {
    "SOLVER.LR_SCHEDULER_NAME": ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR"),
    "SOLVER.WARMUP_METHOD": ("linear", "constant"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
    "DATALOADER.SAMPLER_TRAIN": (
        "TrainingSampler",
        "RepeatFactorTrainingSampler",
        "RandomSubsetTrainingSampler",
    ),
    "INPUT.RANDOM_FLIP": ("horizontal", "vertical", "none"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.CROP.TYPE": ("relative_range", "relative", "absolute", "absolute_range"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
}


def check_run(cfg: CfgNode, *, processes: int = 1, eval_only: bool = False, resume: bool = False) -> None:
    """Check what a run will read and write, before time is spent on building a model.

    Args:
        cfg: the config.
        processes: number of processes on all machines.
        eval_only: whether the run evaluates and does not train.
        resume: whether the run goes on from a checkpoint in OUTPUT_DIR, if there is one.

    Raises:
        ConfigError: a part of the model, a data set, OUTPUT_DIR, or a setting for this machine is wrong.
        CheckpointError: MODEL.WEIGHTS is no file.
    """
    _check_names(cfg)
    if not eval_only:
        for key, right in _CHOICES_IN_TRAINING.items():
            check_choice(cfg, key, right)
        check_training(cfg, processes)
        _check_datasets(cfg, "DATASETS.TRAIN", cfg.DATASETS.TRAIN)
    elif not cfg.DATASETS.TEST:
        raise ConfigError(
            'DATASETS.TEST is (): names no data set to evaluate; write one, such as ("coco_2017_val",)'
        )
    _check_datasets(cfg, "DATASETS.TEST", cfg.DATASETS.TEST)
    _check_output(cfg.OUTPUT_DIR)
    resumes = resume and os.path.isfile(os.path.join(cfg.OUTPUT_DIR, "last_checkpoint"))
    if cfg.MODEL.WEIGHTS and "://" not in cfg.MODEL.WEIGHTS and not resumes:
        find_weights(cfg.MODEL.WEIGHTS)


def check_training(cfg: CfgNode, processes: int = 1) -> None:
    """Check the settings that training on this machine, with this many processes, cannot follow.

    Args:
        cfg: the config, before or after it is scaled to the number of processes.
        processes: number of processes on all machines.

    Raises:
        ConfigError: mixed precision or synchronised batch norm on CPUs, no data, a schedule of no length,
            or a batch that the processes cannot share evenly.
    """
    if not cfg.DATASETS.TRAIN:
        raise ConfigError(
            'DATASETS.TRAIN is (): names no data set to train on; write one, such as ("coco_2017_train",)'
        )
    for key in ("IMS_PER_BATCH", "MAX_ITER", "CHECKPOINT_PERIOD"):
        if cfg.SOLVER[key] < 1:
            raise ConfigError(f"SOLVER.{key} is {cfg.SOLVER[key]}: write 1 or more")
    period, reference = cfg.TEST.EVAL_PERIOD, cfg.SOLVER.REFERENCE_WORLD_SIZE
    if cfg.SOLVER.EARLY_STOP_PATIENCE and reference and round(period * reference / processes) < 1:
        raise ConfigError(
            f"SOLVER.EARLY_STOP_PATIENCE is {cfg.SOLVER.EARLY_STOP_PATIENCE}: it counts evaluations, and "
            f"TEST.EVAL_PERIOD {period}, scaled from {reference} processes (SOLVER.REFERENCE_WORLD_SIZE) to "
            f"{processes}, makes none; write TEST.EVAL_PERIOD {processes} or more"
        )
    on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
    if on_cpu and cfg.SOLVER.AMP.ENABLED:
        raise ConfigError(
            "SOLVER.AMP.ENABLED is True: training in mixed precision needs a CUDA device, and MODEL.DEVICE "
            f"is {cfg.MODEL.DEVICE!r}; write SOLVER.AMP.ENABLED False"
        )
    if processes == 1:
        return
    if on_cpu and torch.cuda.is_available():
        raise ConfigError(
            f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}: {processes} processes on this machine would use its GPUs "
            'to talk to each other; leave MODEL.DEVICE out, or hide the GPUs by CUDA_VISIBLE_DEVICES=""'
        )
    if on_cpu:
        for key, norm in _norms(cfg):
            if norm in SYNC_NORMS:
                raise ConfigError(
                    f"{key} is {norm!r}: PyTorch's does not train on CPUs with {processes} processes; write "
                    '"naiveSyncBN"'
                )
    batch = cfg.SOLVER.IMS_PER_BATCH
    if not reference and batch % processes:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH is {batch}: {processes} processes cannot share it evenly; write a "
            f"multiple of {processes}"
        )


def _check_names(cfg: CfgNode) -> None:
    """Check the names of what a model is made of, and the number of processes that load its data."""
    of_rcnn = cfg.MODEL.META_ARCHITECTURE == "GeneralizedRCNN"
    for key, registry in {**_REGISTRIES, **(_REGISTRIES_OF_RCNN if of_rcnn else {})}.items():
        check_choice(cfg, key, [*sorted(name for name, _ in registry), *_UNREGISTERED.get(key, [])])
    if cfg.DATALOADER.NUM_WORKERS < 0:
        raise ConfigError(
            f"DATALOADER.NUM_WORKERS is {cfg.DATALOADER.NUM_WORKERS}: write 0 (none) or more, such as 4"
        )


def _check_output(folder: str) -> None:
    problem = None
    try:
        PathManager.mkdirs(folder)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
    else:
        if not PathManager.isdir(folder):
            problem = "cannot be made, as a file has that name"
        elif os.path.isdir(folder) and not os.access(folder, os.W_OK):
            problem = "may not be written by this user"
    if problem:
        raise ConfigError(f"OUTPUT_DIR is {folder!r}: {problem}; name a folder that can be written")


def _norms(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _norms(value, f"{prefix}{key}.")
        elif key == "NORM":
            yield f"{prefix}{key}", value


def _check_datasets(cfg: CfgNode, key: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in DatasetCatalog:
            close = difflib.get_close_matches(name, DatasetCatalog.list(), n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(
                f"{key} names {name!r}: not registered{hint}; use a name that Detectron2, or code of yours, "
                "registers"
            )
        metadata = MetadataCatalog.get(name)
        for what, attribute in (("annotations", "json_file"), ("images", "image_root")):
            path = metadata.get(attribute)
            if path and not PathManager.exists(path):
                raise ConfigError(
                    f"{key} names {name!r}: its {what} are looked for at {path}: not there{_remedy(path)}"
                )
        _check_metadata(cfg, key, name)


def _check_metadata(cfg: CfgNode, key: str, name: str) -> None:
    """Check what a data set is known for against the model, which would fail in its first loss."""
    metadata = MetadataCatalog.get(name)
    classes = metadata.get("thing_classes")
    of_retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    head = "MODEL.RETINANET.NUM_CLASSES" if of_retinanet else "MODEL.ROI_HEADS.NUM_CLASSES"
    count = cfg.MODEL.RETINANET.NUM_CLASSES if of_retinanet else cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if classes and count < len(classes):
        raise ConfigError(
            f"{head} is {count}: {key} names {name!r} with {len(classes)} classes; write {len(classes)}"
        )
    if cfg.MODEL.KEYPOINT_ON and classes and not metadata.get("keypoint_names"):
        raise ConfigError(
            f"{key} names {name!r}: it has no keypoints, and MODEL.KEYPOINT_ON is True; write one that has, "
            'such as "keypoints_coco_2017_train"'
        )


def _remedy(path: str) -> str:
    root = os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets"))
    if os.path.abspath(path).startswith(os.path.abspath(root) + os.sep):
        parent = os.path.relpath(path, root).split(os.sep)[0]
        return (
            f"; set the environment variable DETECTRON2_DATASETS to the folder that holds {parent}/ "
            f"(now {os.environ.get('DETECTRON2_DATASETS') or 'unset, so ./datasets'})"
        )
    return "; correct the path"
