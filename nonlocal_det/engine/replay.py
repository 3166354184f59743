"""Batches that were saved because a loss was not finite, and computing their losses again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from detectron2.utils.events import EventStorage
from torch import nn

from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.data.random_states import isolated_randomness, set_random_states
from nonlocal_det.engine.task import Task, all_tasks
from nonlocal_det.files import write_whole


def save_batch(
    path: str, task: Task, model: nn.Module, batch: Any, random_states: Mapping[str, Any], **more: Any
) -> None:
    """Write a batch with the weights and random states that its step began with, and ``more``.

    The file holds plain containers and tensors; ``task`` encodes what only it knows.

    Raises:
        OSError: the file cannot be written.
    """
    states = {"random_states": random_states, "model": model.state_dict()}
    content = {**more, "batch": _encode(batch, task), **states}
    write_whole(path, lambda file: torch.save(content, file))


def replay_batch(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the losses of a saved batch by name, computed with its weights and random numbers.

    ``model`` is a model of the same config; its weights are replaced.

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


def _encode(value: Any, task: Task) -> Any:
    """Make plain containers and tensors of a batch, so that reading it back cannot run code."""
    if isinstance(value, np.ndarray):
        return {"is": "array", "tensor": torch.from_numpy(value)}
    if (found := task.encode(value)) is not None:
        value = found
    if isinstance(value, Mapping):
        return {key: _encode(item, task) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, task) for item in value]
    return value if isinstance(value, (torch.Tensor, str, int, float, type(None))) else repr(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("is") == "array":
        return value["tensor"].numpy()
    decoded = {key: _decode(item) for key, item in value.items()}
    if "is" not in decoded:
        return decoded
    return next((found for task in all_tasks() if (found := task.decode(decoded)) is not None), decoded)
