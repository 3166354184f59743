"""What can be found wrong before a model is built: settings, schedule, machine, data sets, output folder."""

from __future__ import annotations

import difflib
import os

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from nonlocal_det.config.messages import check_choice, check_least, config_error, flatten
from nonlocal_det.data.cache import is_made_on_first_use
from nonlocal_det.errors import ConfigError

# What Detectron2 takes. Other values it finds late, or takes for "none".
_CHOICES_IN_TRAINING = {
    "SOLVER.LR_SCHEDULER_NAME": ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR"),
    "SOLVER.WARMUP_METHOD": ("linear", "constant"),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
}


def check_settings(cfg: CfgNode) -> None:
    """Check the keys that concern every task, as far as the config alone tells.

    Raises:
        ConfigError: the first thing found.
    """
    _check_device(cfg.MODEL.DEVICE)
    check_choice(cfg, "INPUT.FORMAT", ("BGR", "RGB", "L", "YUV-BT.601"))
    check_least(cfg, "SOLVER.SKIP_NONFINITE_STEPS", 0, "must be 0 (stop at the first) or more")
    check_least(cfg, "SOLVER.EARLY_STOP_PATIENCE", 0, "must be 0 (train to the end) or more, such as 5")
    patience, period = cfg.SOLVER.EARLY_STOP_PATIENCE, cfg.TEST.EVAL_PERIOD
    if patience and period < 1:
        raise ConfigError(
            f"SOLVER.EARLY_STOP_PATIENCE is {patience}: it counts evaluations, and TEST.EVAL_PERIOD {period} "
            "makes none while training; write a number of iterations there, or 0 here"
        )
    for key, value in (("SOLVER.EARLY_STOP_PATIENCE", patience), ("TEST.VAL_LOSS", cfg.TEST.VAL_LOSS)):
        if value and not cfg.DATASETS.TEST:
            raise config_error(
                key, value, "would be ignored, as DATASETS.TEST is (); name a data set there, or leave it out"
            )
    fraction = cfg.DATALOADER.MAX_BAD_FRACTION
    if not 0 <= fraction <= 1:
        raise config_error("DATALOADER.MAX_BAD_FRACTION", fraction, "must be from 0 to 1, such as 0.01")
    reference, batch = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.IMS_PER_BATCH
    if reference and batch % reference:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH is {batch}: it counts the images of {reference} GPUs "
            "(SOLVER.REFERENCE_WORLD_SIZE) and is scaled to those in use, so it must be a multiple of "
            f"{reference}; to train with {batch} as it stands, write SOLVER.REFERENCE_WORLD_SIZE 0"
        )


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise config_error("MODEL.DEVICE", device, 'not a device; write "cuda" or "cpu"') from None
    if kind == "cuda" and not torch.cuda.is_available():
        why = 'PyTorch sees no CUDA device here; write "cpu" or leave the key out'
        raise config_error("MODEL.DEVICE", device, why)


def check_training(cfg: CfgNode, processes: int = 1) -> None:
    """Check the settings that training with this number of processes, on all machines, cannot follow.

    Raises:
        ConfigError: mixed precision or synchronised batch norm on CPUs, no data, a schedule of no length,
            or a batch that the processes cannot share evenly.
    """
    for key, right in _CHOICES_IN_TRAINING.items():
        check_choice(cfg, key, right)
    if not cfg.DATASETS.TRAIN:
        raise ConfigError(
            'DATASETS.TRAIN is (): names no data set to train on; write one, such as ("coco_2017_train",)'
        )
    for key in ("IMS_PER_BATCH", "MAX_ITER", "CHECKPOINT_PERIOD"):
        check_least(cfg, f"SOLVER.{key}", 1, "write 1 or more")
    period, reference = cfg.TEST.EVAL_PERIOD, cfg.SOLVER.REFERENCE_WORLD_SIZE
    if cfg.SOLVER.EARLY_STOP_PATIENCE and reference and round(period * reference / processes) < 1:
        raise ConfigError(
            f"SOLVER.EARLY_STOP_PATIENCE is {cfg.SOLVER.EARLY_STOP_PATIENCE}: it counts evaluations, and "
            f"TEST.EVAL_PERIOD {period}, scaled from {reference} processes (SOLVER.REFERENCE_WORLD_SIZE) to "
            f"{processes}, makes none; write TEST.EVAL_PERIOD {processes} or more"
        )
    device, batch = cfg.MODEL.DEVICE, cfg.SOLVER.IMS_PER_BATCH
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and cfg.SOLVER.AMP.ENABLED:
        raise ConfigError(
            "SOLVER.AMP.ENABLED is True: training in mixed precision needs a CUDA device, and MODEL.DEVICE "
            f"is {device!r}; write SOLVER.AMP.ENABLED False"
        )
    if on_cpu and processes > 1:
        if torch.cuda.is_available():
            raise ConfigError(
                f"MODEL.DEVICE is {device!r}: {processes} processes on this machine would use its GPUs to "
                'talk to each other; leave MODEL.DEVICE out, or hide the GPUs by CUDA_VISIBLE_DEVICES=""'
            )
        for key, norm in flatten(cfg):
            if key.endswith(".NORM") and norm in ("SyncBN", "nnSyncBN"):
                why = f'PyTorch\'s does not train on CPUs with {processes} processes; write "naiveSyncBN"'
                raise config_error(key, norm, why)
    if not reference and batch % processes:
        why = f"{processes} processes cannot share it evenly; write a multiple of {processes}"
        raise config_error("SOLVER.IMS_PER_BATCH", batch, why)


def check_output(folder: str) -> None:
    """Check that OUTPUT_DIR can be written; it is made where it is missing.

    Raises:
        ConfigError: it cannot.
    """
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
        raise config_error("OUTPUT_DIR", folder, f"{problem}; name a folder that can be written")


def check_datasets(key: str, names: tuple[str, ...]) -> None:
    """Check that the data sets which a key names are registered, and that their files are there.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        if name not in DatasetCatalog:
            close = difflib.get_close_matches(name, DatasetCatalog.list(), n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(
                f"{key} names {name!r}: not registered{hint}; use a name that Detectron2, or code of yours, "
                "registers"
            )
        if is_made_on_first_use(name):
            continue
        for what, attribute in (("annotations", "json_file"), ("images", "image_root")):
            path = MetadataCatalog.get(name).get(attribute)
            if path and not PathManager.exists(path):
                raise ConfigError(
                    f"{key} names {name!r}: its {what} are looked for at {path}: not there{_remedy(path)}"
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
