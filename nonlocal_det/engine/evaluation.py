"""Evaluating a model on the data sets of DATASETS.TEST."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn

from nonlocal_det.data.random_states import isolated_randomness
from nonlocal_det.engine.preemption import StoppableLoader, StopRequest
from nonlocal_det.engine.task import Task, find_task
from nonlocal_det.layers.kernels import settle_kernels

logger = logging.getLogger(__name__)


def evaluate(
    cfg: CfgNode,
    model: nn.Module,
    *,
    task: Task | None = None,
    stop: StopRequest | None = None,
    folder: str = "inference",
) -> OrderedDict[str, Any]:
    """Evaluate, and leave the random states and the mode of the model as they were.

    Args:
        cfg: the config.
        model: the model.
        task: the task; by default the config's.
        stop: a request that cuts the evaluation short in all processes.
        folder: name of the folder in OUTPUT_DIR that predictions go to.

    Returns:
        Results by what is predicted and metric; by data set first if there are several.

    Raises:
        ImageError: a picture cannot be read.
        Preempted: a signal to one of the processes has cut the evaluation short.
    """
    task = task or find_task(cfg)
    settle_kernels(model)
    training = model.training
    results: OrderedDict[str, Any] = OrderedDict()
    with isolated_randomness():
        try:
            for dataset in cfg.DATASETS.TEST:
                loader = StoppableLoader(task.build_test_loader(cfg, dataset), stop)
                # With several data sets each has a folder, or it would overwrite the one before.
                target = os.path.join(cfg.OUTPUT_DIR, folder, metric_prefix(cfg, dataset).rstrip("/"))
                evaluator = task.build_evaluator(cfg, dataset, target)
                results[dataset] = inference_on_dataset(model, loader, evaluator)
                if comm.is_main_process():
                    logger.info("Evaluation results for %s in csv format:", dataset)
                    print_csv_format(results[dataset])
        finally:
            model.train(training)  # Detectron2 does it only where the evaluation ends
    return results[cfg.DATASETS.TEST[0]] if len(results) == 1 else results


def evaluate_augmented(
    cfg: CfgNode, model: nn.Module, *, task: Task | None = None, stop: StopRequest | None = None
) -> OrderedDict[str, Any]:
    """Do what :func:`evaluate` does, with test-time augmentation (TEST.AUG) and "_TTA" after each key."""
    task = task or find_task(cfg)
    logger.info("Evaluating with test-time augmentation")
    augmented = task.augment(cfg, model)
    results = evaluate(cfg, augmented, task=task, stop=stop, folder="inference_TTA")
    return OrderedDict((f"{key}_TTA", value) for key, value in results.items())


def metric_prefix(cfg: CfgNode, dataset: str) -> str:
    """Return what stands before the metrics of a data set: nothing where there is only one."""
    return f"{dataset}/" if len(cfg.DATASETS.TEST) > 1 else ""
