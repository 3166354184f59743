"""The validation loss: the losses of training, of the data that is evaluated."""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn
from torch.utils.data import DataLoader

from nonlocal_det.data.random_states import isolated_randomness
from nonlocal_det.engine.preemption import StoppableLoader, StopRequest
from nonlocal_det.engine.task import Task, find_task
from nonlocal_det.errors import listed
from nonlocal_det.upstream import BatchNormBase, DropoutBase

logger = logging.getLogger(__name__)


class ValidationLoss:
    """Computes the losses of a model on each data set of DATASETS.TEST that has annotations.

    The images are those of the evaluation, resized alike and not augmented. Each is a batch of its own, so
    that the mean does not depend on the number of processes, and what is drawn at random, such as the
    proposals that count, is the same in every evaluation. Losses are computed as in training, except that
    norms use their running statistics and dropout is off, as in the evaluation. Neither the model nor any
    random state is changed. Images whose annotations cannot be used are left out, and logged.

    Args:
        cfg: the config.
        task: its task.
        stop: a request that cuts the computation short in all processes.
    """

    def __init__(self, cfg: CfgNode, task: Task | None = None, stop: StopRequest | None = None) -> None:
        self._cfg, self._task, self._stop = cfg, task or find_task(cfg), stop
        self._loaders: dict[str, DataLoader | None] | None = None

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Compute the losses of a model that is not wrapped. All processes must call this.

        Returns:
            In the main process, for each data set the mean over its images of "total_loss" and of every loss
            by name; NaN where proposals are not finite. Empty in the others.
        """
        found: dict[str, dict[str, float]] = {}
        with isolated_randomness():
            if self._loaders is None:
                names = self._cfg.DATASETS.TEST
                self._loaders = {name: self._task.build_validation_loader(self._cfg, name) for name in names}
            with _computes_losses(model), torch.no_grad(), warnings.catch_warnings():
                # Keypoint heads take means over no images for the event storage.
                warnings.filterwarnings("ignore", "Mean of empty slice|invalid value", RuntimeWarning)
                for name, loader in self._loaders.items():
                    if loader is not None:
                        found[name] = self._mean_losses(model, name, loader)
        return {name: losses for name, losses in found.items() if losses}

    def _mean_losses(self, model: nn.Module, name: str, loader: DataLoader) -> dict[str, float]:
        """Return the mean losses over the images of all processes, in the main one."""
        sums: defaultdict[str, float] = defaultdict(float)
        images, finite, bad = 0, True, []
        numbered = zip(loader.sampler, StoppableLoader(loader, self._stop), strict=True)
        for place, (number, (image,)) in enumerate(numbered, 1):
            if isinstance(image, str):
                bad.append(image)
                continue
            torch.manual_seed(number)
            try:
                # What the modules record is not of training.
                with _keeps_attributes(model), EventStorage():
                    losses = model([image])
            except FloatingPointError:  # by the region proposal network
                finite = False
            else:
                # Read at once: each read waits for the GPU.
                values = torch.stack([loss.float() for loss in losses.values()]).tolist()
                for key, value in zip(losses, values, strict=True):
                    sums[key] += value
                sums["total_loss"] += math.fsum(values)
            images += 1
            if place % 500 == 0:
                logger.info("Validation loss of %s: %d of %d images", name, place, len(loader))
        return _join(name, comm.gather((dict(sums), images, finite, bad)))


def _join(name: str, parts: Sequence[tuple[dict[str, float], int, bool, list[str]]]) -> dict[str, float]:
    """Join what the processes found."""
    bad = [reason for *_, reasons in parts for reason in reasons]
    if bad:
        logger.warning("The validation loss of %s is without %s", name, listed(bad))
    images = sum(part[1] for part in parts)
    if not images:
        return {}
    if not all(part[2] for part in parts):
        return {"total_loss": math.nan}
    # The order of the model, the total first.
    names = dict.fromkeys(["total_loss", *(key for sums, *_ in parts for key in sums)])
    return {key: math.fsum(sums.get(key, 0.0) for sums, *_ in parts) / images for key in names}


@contextmanager
def _computes_losses(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, but for what would make it another than the one evaluated."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    for module in model.modules():
        if isinstance(module, (BatchNormBase, DropoutBase)):
            module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _keeps_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass sets on the model: RetinaNet has a moving average of positive anchors."""
    before = dict(vars(model))
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(before)
