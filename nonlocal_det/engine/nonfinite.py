"""Steps whose loss is not finite: found by all processes before backward, saved for replay, maybe skipped."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.data.random_states import isolated_randomness, random_states, set_random_states
from nonlocal_det.errors import NonFiniteLossError
from nonlocal_det.files import write_whole

__all__ = ["LossGuard", "replay_batch"]

logger = logging.getLogger(__name__)

#: What holds one tensor, by the attribute that holds it.
_WRAPPERS = {Boxes: "tensor", RotatedBoxes: "tensor", BitMasks: "tensor", Keypoints: "tensor"}


class _Skip(Exception):  # noqa: N818
    """Leaves a step after its forward pass."""


class LossGuard:
    """Looks at the losses of every training step before backward, in all processes together.

    A step with a loss that is not finite in any process changes nothing in any of them: neither weights nor
    running statistics. The batch is saved by the process that had it.

    Attributes:
        skipped: number of steps that were skipped so far.

    Args:
        model: the model, with its wrapper for several processes.
        folder: where batches are saved.
        max_skipped: number of steps that may be skipped; one more is an error.
    """

    def __init__(self, model: nn.Module, folder: str, max_skipped: int = 0) -> None:
        self.skipped = 0
        self._model = getattr(model, "module", model)
        self._folder = folder
        self._max_skipped = max_skipped
        self._iteration: int | None = None  # while a step runs; the model is also called by others
        self._batch: Any = None
        self._random_states: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        model.register_forward_pre_hook(self._remember)
        model.register_forward_hook(self._look)

    def run(self, step: Callable[[], None], iteration: int) -> None:
        """Do one training step, or skip it.

        Args:
            step: calls the model once with a batch, goes backward and steps the optimizer.
            iteration: the number of the step.

        Raises:
            NonFiniteLossError: a loss is not finite, and no step may be skipped any more.
        """
        self._iteration, self._batch = iteration, None
        try:
            step()
        except _Skip:
            pass
        except FloatingPointError as error:
            if self._batch is None or isinstance(error, NonFiniteLossError):
                raise
            # The region proposal network found it; the other processes wait in _look.
            with contextlib.suppress(_Skip):
                self._agree({"rpn": float("nan")})
        finally:
            self._iteration = self._batch = None

    def _remember(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._iteration is None:
            return
        self._batch, self._random_states = inputs[0], random_states()
        if self._max_skipped:
            self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _look(self, model: nn.Module, inputs: tuple[Any, ...], losses: Any) -> None:
        if self._iteration is None:
            return
        named = losses if isinstance(losses, Mapping) else {"total_loss": losses}
        # One look for all: on a GPU each waits for it.
        values = torch.stack([value.detach().float().sum() for value in named.values()]).tolist()
        self._agree({name: x for name, x in zip(named, values, strict=True) if not np.isfinite(x)})
        self._batch = None

    def _agree(self, bad: dict[str, float]) -> None:
        """Raise _Skip in all processes if a loss of any is bad, or NonFiniteLossError."""
        if not any(comm.all_gather(bool(bad))):
            return
        found = [report for report in comm.all_gather(self._report(bad) if bad else "") if report]
        for name, buffer in self._model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        what = f"iteration {self._iteration}: {'; '.join(found)}"
        if self.skipped >= self._max_skipped:
            raise NonFiniteLossError(
                f"SOLVER.SKIP_NONFINITE_STEPS is {self._max_skipped}: no step is left to skip in {what}; "
                "lower SOLVER.BASE_LR, look at the images, or write a larger number"
            )
        self.skipped += 1
        logger.warning("Skipped step %d of at most %d, %s", self.skipped, self._max_skipped, what)
        raise _Skip

    def _report(self, bad: dict[str, float]) -> str:
        images = [
            f"{image.get('file_name', 'image without file')} (id {image.get('image_id')})"
            for image in self._batch
        ]
        losses = ", ".join(
            "the proposals are not finite" if name == "rpn" else f"{name} is {value}"
            for name, value in bad.items()
        )
        return f"{losses} for {', '.join(images)}; {self._save(bad)}"

    def _save(self, bad: dict[str, float]) -> str:
        path = os.path.join(self._folder, f"nonfinite_{self._iteration:07d}_rank{comm.get_rank()}.pth")
        content = {
            "iteration": self._iteration,
            "losses": bad,
            "batch": _encode(self._batch),
            "random_states": self._random_states,
            "model": self._model.state_dict(),
        }
        try:
            write_whole(path, lambda file: torch.save(content, file))
        except OSError as error:
            return f"the batch cannot be saved in {path} ({error.strerror})"
        return f"batch and weights are in {path}"


def replay_batch(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Compute the losses of a saved batch again: the same weights, images and random numbers.

    Args:
        model: a model of the same config; its weights are replaced.
        path: the file that the log names.

    Returns:
        The losses by name.

    Raises:
        CheckpointError: the file is damaged or no saved batch.
        FloatingPointError: the region proposal network finds its output not finite, as it did then.
        OSError: the file cannot be opened.
    """
    content = read_checkpoint(path)
    model.load_state_dict(content["model"])
    training = model.training
    with isolated_randomness(), EventStorage(), torch.no_grad():
        set_random_states(content["random_states"])
        try:
            return model.train()(_decode(content["batch"]))
        finally:
            model.train(training)


def _encode(value: Any) -> Any:
    """Make plain containers and tensors of a batch, so that reading it back cannot run code."""
    if isinstance(value, np.ndarray):
        return {"is": "array", "tensor": torch.from_numpy(value)}
    if isinstance(value, PolygonMasks):
        return {"is": "PolygonMasks", "polygons": _encode(value.polygons)}
    if isinstance(value, Instances):
        return {
            "is": "Instances",
            "image_size": list(value.image_size),
            "fields": _encode(value.get_fields()),
        }
    for kind, attribute in _WRAPPERS.items():
        if type(value) is kind:
            return {"is": kind.__name__, "tensor": getattr(value, attribute)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value if isinstance(value, (torch.Tensor, str, int, float, type(None))) else repr(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("is")
    if kind == "array":
        return value["tensor"].numpy()
    if kind == "PolygonMasks":
        return PolygonMasks(_decode(value["polygons"]))
    if kind == "Instances":
        return Instances(tuple(value["image_size"]), **_decode(value["fields"]))
    for wrapper in _WRAPPERS:
        if kind == wrapper.__name__:
            return wrapper(value["tensor"])
    return {key: _decode(item) for key, item in value.items()}
