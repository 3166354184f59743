"""What the engine asks of a task, the tasks that there are, and the configs of all of them.

A task has what the engine does not know: its keys, data sets, loaders, evaluators and scores. It puts itself
into the list by :func:`register_task` when its package is imported.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.utils.data import DataLoader

import nonlocal_det
from nonlocal_det.checkpoint.checkpointer import find_weights
from nonlocal_det.config import keys
from nonlocal_det.config.loading import load_config
from nonlocal_det.config.messages import check_least
from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.engine.checks import check_datasets, check_output, check_settings, check_training
from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.checks import check_blocks


class Task(ABC):
    """One kind of training and evaluation."""

    name: str
    architectures: frozenset[str]  # the values of MODEL.META_ARCHITECTURE that it knows

    @abstractmethod
    def add_keys(self, cfg: CfgNode) -> None:
        """Add the task's keys to a config that has those of Detectron2 and of the engine."""

    @abstractmethod
    def register_datasets(self, cfg: CfgNode, folders: Sequence[Path], user_keys: set[str]) -> None:
        """Register DATASETS.REGISTER, and set what the files decide and the user did not.

        Args:
            cfg: the config, changed in place.
            folders: where relative paths are looked up besides the working directory.
            user_keys: the keys that the user set; those of the project's own config files are not.

        Raises:
            ConfigError: a file cannot be used, or contradicts a setting.
        """

    @abstractmethod
    def check_settings(self, cfg: CfgNode) -> None:
        """Raise a ConfigError for settings of the task that are wrong or would be ignored."""

    @abstractmethod
    def check_parts(self, cfg: CfgNode, *, training: bool) -> None:
        """Raise a ConfigError for an unknown part of the model or, in training, choice of the loader."""

    @abstractmethod
    def check_classes(self, cfg: CfgNode, key: str, name: str) -> None:
        """Raise a ConfigError for a data set with more classes than the model, or without what it learns.

        ``key``, "DATASETS.TRAIN" or "DATASETS.TEST", names the data set ``name``, which is registered.
        """

    @abstractmethod
    def check_data(self, cfg: CfgNode, *, training: bool) -> None:
        """Read the data sets' files and log what is found; raise a ConfigError where they have errors."""

    def release_data(self) -> None:
        """Forget what is kept of the files for loaders, in a process that will build none."""
        return

    @abstractmethod
    def build_train_loader(self, cfg: CfgNode, seed: int) -> TrainLoader:
        """Return the loader of training data; raise a ConfigError for data that it cannot order or read."""

    @abstractmethod
    def build_test_loader(self, cfg: CfgNode, dataset: str) -> DataLoader:
        """Return the loader of data to evaluate on."""

    @abstractmethod
    def build_validation_loader(self, cfg: CfgNode, dataset: str) -> DataLoader | None:
        """Return the test loader with ground truth, one sample a batch; None without ground truth.

        Instead of a sample that cannot be used it gives one line of text that says why.
        """

    @abstractmethod
    def build_evaluator(self, cfg: CfgNode, dataset: str, folder: str) -> DatasetEvaluator:
        """Return the evaluator of a data set, which writes predictions into a folder."""

    @abstractmethod
    def scores(self, cfg: CfgNode) -> tuple[str, ...]:
        """Return the names of the scores, such as "segm/AP", that the model has, the one for "best" first."""

    def augment(self, cfg: CfgNode, model: nn.Module) -> nn.Module | None:
        """Return the model with test-time augmentation, where the config asks for it (TEST.AUG)."""
        return None

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Return what a model carries from step to step besides parameters and buffers."""
        return {}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned; other keys are ignored."""
        return

    def encode(self, value: Any) -> dict[str, Any] | None:
        """Make a plain dict with a key "is" of a batch's object; None for what is not the task's."""
        return None

    def decode(self, value: Mapping[str, Any]) -> Any:
        """Make the object of what :meth:`encode` returned; None for what is not the task's."""
        return None

    @abstractmethod
    def count_flops(self, model: nn.Module, height: int, width: int) -> Any:
        """Count the multiply-adds for one input (:class:`nonlocal_det.modeling.flops.Flops`)."""

    @abstractmethod
    def probe(self, cfg: CfgNode, folder: Path) -> dict[str, Any]:
        """Compute from the predictions in a run's OUTPUT_DIR what the built-in data sets are drawn to show.

        Raises:
            DatasetError: a file cannot be read, or is damaged.
        """


#: The tasks, in the order in which they were registered.
_tasks: list[Task] = []


def register_task(task: Task) -> None:
    """Put a task into the list, unless it has one of that name."""
    if task.name not in (other.name for other in _tasks):
        _tasks.append(task)


def all_tasks() -> tuple[Task, ...]:
    """Return the tasks; those of this package are registered where nobody has asked for one yet."""
    if not _tasks:
        nonlocal_det.register_all()
    return tuple(_tasks)


def find_task(cfg: CfgNode) -> Task:
    """Return the task whose architecture a config names; the first one for an architecture of the user's."""
    tasks = all_tasks()
    return next((task for task in tasks if cfg.MODEL.META_ARCHITECTURE in task.architectures), tasks[0])


def add_nonlocal_config(cfg: CfgNode) -> None:
    """Add this package's keys to a Detectron2 config, in place. A second call changes nothing."""
    if "NONLOCAL" in cfg.MODEL:
        return
    keys.add_keys(cfg)
    for task in all_tasks():
        task.add_keys(cfg)


def get_config(config_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """Load a config with the keys of all tasks, and check it.

    YAML is loaded safely: a file cannot run code. MODEL.DEVICE becomes "cpu" where there is no CUDA device
    and neither the files nor ``opts`` set it. The data sets of DATASETS.REGISTER are registered, and what
    their files decide, such as the number of classes, is set.

    Args:
        config_file: a path, or else a name under ``configs/`` such as
            ``COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml``.
        opts: overrides, ``[KEY, VALUE, KEY, VALUE, ...]``; a value is a Python object or its text.

    Returns:
        The config, not frozen.

    Raises:
        ConfigError: the file or a setting is wrong; the message says how to mend it.
    """
    cfg, user_keys, folders = load_config(config_file, opts, add_nonlocal_config)
    task = find_task(cfg)
    task.register_datasets(cfg, folders, user_keys)
    check_settings(cfg)
    check_blocks(cfg)
    task.check_settings(cfg)
    return cfg


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
    task = find_task(cfg)
    task.check_parts(cfg, training=not eval_only)
    check_least(cfg, "DATALOADER.NUM_WORKERS", 0, "write 0 (none) or more, such as 4")
    if not eval_only:
        check_training(cfg, processes)
    elif not cfg.DATASETS.TEST:
        raise ConfigError(
            'DATASETS.TEST is (): names no data set to evaluate; write one, such as ("coco_2017_val",)'
        )
    for key in ("TEST",) if eval_only else ("TRAIN", "TEST"):
        check_datasets(f"DATASETS.{key}", cfg.DATASETS[key])
        for name in cfg.DATASETS[key]:
            task.check_classes(cfg, f"DATASETS.{key}", name)
    check_output(cfg.OUTPUT_DIR)
    resumes = resume and os.path.isfile(os.path.join(cfg.OUTPUT_DIR, "last_checkpoint"))
    if cfg.MODEL.WEIGHTS and "://" not in cfg.MODEL.WEIGHTS and not resumes:
        find_weights(cfg.MODEL.WEIGHTS)
