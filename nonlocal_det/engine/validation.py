"""The validation loss: the losses of training, of the data that is evaluated."""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper, build_detection_test_loader
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from nonlocal_det.data.images import PictureMapper
from nonlocal_det.data.randomness import isolated_randomness
from nonlocal_det.engine.preemption import StoppableLoader

__all__ = ["ValidationLoss"]

logger = logging.getLogger(__name__)


class ValidationLoss:
    """Computes the losses of a model on each data set of DATASETS.TEST that has annotations.

    The images are all those of the evaluation, resized as there and not augmented. Each is a batch of its
    own, so that the mean over them does not depend on the number of processes; what is drawn at random, such
    as the proposals that count, is the same in every evaluation. Losses are computed as in training, but for
    norms, which use their running statistics, and dropout, which is off: the model is the one that is
    evaluated. Neither it nor any random state is changed.

    Images whose annotations cannot be used are left out, and logged.

    Args:
        cfg: the config.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._cfg = cfg
        self._loaders: dict[str, DataLoader] | None = None

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Compute the losses. All processes must call this.

        Args:
            model: a detector of Detectron2's, without a wrapper for several processes.

        Returns:
            In the main process, for each data set the mean over its images of "total_loss" and of every loss
            by name; NaN where proposals are not finite. Empty in the others.
        """
        with isolated_randomness():
            if self._loaders is None:
                self._loaders = {
                    name: loader
                    for name in self._cfg.DATASETS.TEST
                    if (loader := _build_loader(self._cfg, name)) is not None
                }
            with _computes_losses(model), torch.no_grad(), warnings.catch_warnings():
                # Keypoint heads take means over no images for the event storage.
                warnings.filterwarnings("ignore", "Mean of empty slice|invalid value", RuntimeWarning)
                found = {name: _mean_losses(model, name, loader) for name, loader in self._loaders.items()}
        return {name: losses for name, losses in found.items() if losses}


def _build_loader(cfg: CfgNode, name: str) -> DataLoader | None:
    """Return the loader of the evaluation, with ground truth; None without annotations."""
    mapper = DatasetMapper(**{**DatasetMapper.from_config(cfg, is_train=False), "is_train": True})
    parts = build_detection_test_loader.from_config(cfg, name, mapper=_OrReason(PictureMapper(mapper)))
    objects = [
        obj for record in parts["dataset"] for obj in record.get("annotations", ()) if not obj.get("iscrowd")
    ]
    if not objects:
        logger.info("%s has no annotations to compute a validation loss with", name)
        return None
    if any(isinstance(obj.get("segmentation"), dict) for obj in objects):
        # INPUT.MASK_FORMAT is that of the training data. An RLE cannot become polygons.
        mapper.instance_mask_format = "bitmask"
    return build_detection_test_loader(**parts)


class _OrReason:
    """Maps an image, or returns one line that says why it cannot be."""

    def __init__(self, mapper: Callable[[Any], Any]) -> None:
        self._mapper = mapper

    def __call__(self, record: Mapping[str, Any]) -> Any:
        try:
            return self._mapper(record)
        except MemoryError:
            raise
        except Exception as error:  # impossible annotations raise nearly every type
            reason = " ".join(str(error).split())
            name = f"{record.get('file_name')} (id {record.get('image_id')})"
            return f"{name}: {type(error).__name__}: {reason}"[:300]


def _mean_losses(model: nn.Module, name: str, loader: DataLoader) -> dict[str, float]:
    """Return the mean losses over the images of all processes, in the main one."""
    sums: defaultdict[str, float] = defaultdict(float)
    images, finite, bad = 0, True, []
    for place, (number, (image,)) in enumerate(zip(loader.sampler, StoppableLoader(loader), strict=True)):
        if isinstance(image, str):
            bad.append(image)
            continue
        torch.manual_seed(number)
        try:
            # The events of training modules are not those of training here.
            with _keeps_attributes(model), EventStorage():
                losses = model([image])
        except FloatingPointError:  # by the region proposal network
            finite = False
        else:
            # One look for all: on a GPU each waits for it.
            values = torch.stack([loss.float() for loss in losses.values()]).tolist()
            for key, value in zip(losses, values, strict=True):
                sums[key] += value
            sums["total_loss"] += math.fsum(values)
        images += 1
        if (place + 1) % 500 == 0:
            logger.info("Validation loss of %s: %d of %d images", name, place + 1, len(loader))
    return _join(name, comm.gather((dict(sums), images, finite, bad)))


def _join(name: str, parts: Sequence[tuple[dict[str, float], int, bool, list[str]]]) -> dict[str, float]:
    """Join what the processes found."""
    bad = [reason for *_, reasons in parts for reason in reasons]
    if bad:
        more = f", and {len(bad) - 3} more" if len(bad) > 3 else ""
        logger.warning("The validation loss of %s is without %s%s", name, ", ".join(bad[:3]), more)
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
        if isinstance(module, (_NormBase, _DropoutNd)):
            module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _keeps_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass sets on the model: RetinaNet keeps a moving average of positive anchors."""
    before = dict(vars(model))
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(before)
