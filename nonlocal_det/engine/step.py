"""One training step: forward, agreement between the processes, backward, and the optimizer's."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import distributed, nn

from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.data.random_states import random_states
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.engine.replay import save_batch
from nonlocal_det.engine.task import Task
from nonlocal_det.errors import NonFiniteLossError
from nonlocal_det.upstream import global_gloo_group

logger = logging.getLogger(__name__)

#: How many losses are averaged over the processes; of more, the log has those of the main process.
_SHARED_LOSSES = 64


class TrainingStep:
    """Does the steps of a run, with mixed precision or without.

    Before backward the processes exchange, in one collective, whether the losses of each are finite, whether
    it was asked to stop, and whether it met samples that cannot be used. A step with a loss that is not
    finite in any process changes nothing in any of them, neither weights nor running statistics, and the
    batch is saved by the process that had it.

    Args:
        model: the model, with its wrapper for several processes.
        loader: gives the batches.
        optimizer: changes the weights.
        task: encodes batches that are saved.
        folder: where they are saved.
        max_skipped: number of steps that may be skipped; one more is an error.
        mixed_precision: whether forward runs in float16 where that is safe.
        stop: says whether this process was asked to stop.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        *,
        task: Task,
        folder: str,
        max_skipped: int = 0,
        mixed_precision: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        self.skipped = 0  # steps so far
        self.stopping = False  # whether a process was asked to stop before the last step's backward
        self._model, self._loader, self._optimizer = model.train(), loader, optimizer
        self._bare = getattr(model, "module", model)
        self._task, self._folder, self._stop = task, folder, stop
        self._max_skipped, self._mixed_precision = max_skipped, mixed_precision
        self._device = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(self._device, enabled=mixed_precision)
        self._batches: Iterator[Any] | None = None

    def __call__(self, iteration: int, storage: EventStorage) -> None:
        """Do one step, or skip it in all processes; put the losses and the data's time into the storage.

        Raises:
            NonFiniteLossError: a loss is not finite, and no step may be skipped any more.
            BadDataError: too many samples cannot be used.
        """
        start = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        data_time = time.perf_counter() - start
        before = random_states()
        buffers = {name: x.clone() for name, x in self._bare.named_buffers()} if self._max_skipped else {}
        losses = self._forward(batch)
        values = _read(losses)
        rows = self._exchange(values, data_time)
        if any(row[2] for row in rows):
            self._skip(iteration, batch, values, before, buffers)
            return
        self._optimizer.zero_grad()
        self.scaler.scale(sum(losses.values())).backward()
        self._write(storage, values, rows)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _forward(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the losses by name; none where the region proposal network found its output not finite."""
        try:
            with torch.autocast(self._device, torch.float16, enabled=self._mixed_precision):
                losses = self._model(batch)
        except FloatingPointError:
            return {}
        return losses if isinstance(losses, Mapping) else {"total_loss": losses}

    def _exchange(self, values: Mapping[str, float], data_time: float) -> list[Sequence[float]]:
        """Return of each process what it tells about its step.

        That is: whether it was asked to stop, how many samples it could not use, whether a loss is not
        finite, the seconds that its data took, and its losses.
        """
        loader = self._loader if isinstance(self._loader, TrainLoader) else None
        bad = loader.take_bad() if loader else []
        broken = not all(map(math.isfinite, values.values()))
        rows = _all_gather([bool(self._stop), len(bad), broken, data_time, *values.values()])
        self.stopping = any(row[0] for row in rows)
        if loader and any(row[1] for row in rows):
            loader.count_bad(sample for samples in comm.all_gather(bad) for sample in samples)
        return rows

    def _write(self, storage: EventStorage, values: Mapping[str, float], rows: list[Sequence[float]]) -> None:
        """Record the losses, as means over the processes, and the time of the slowest data."""
        storage.put_scalar("rank_data_time", rows[comm.get_rank()][3])
        if not comm.is_main_process():
            return
        storage.put_scalar("data_time", max(row[3] for row in rows))
        columns = zip(*(row[4:] for row in rows), strict=True)
        means = dict(values)
        means.update((name, float(np.mean(column))) for name, column in zip(values, columns, strict=False))
        storage.put_scalar("total_loss", sum(means.values()))
        if len(means) > 1:
            storage.put_scalars(**means)

    def _skip(
        self,
        iteration: int,
        batch: Any,
        values: Mapping[str, float],
        before: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Leave everything as it was before the step, and count it."""
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        report = self._report(iteration, batch, bad, before) if bad else ""
        what = f"iteration {iteration}: {'; '.join(filter(None, comm.all_gather(report)))}"
        for name, buffer in self._bare.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        if self.skipped >= self._max_skipped:
            raise NonFiniteLossError(
                f"SOLVER.SKIP_NONFINITE_STEPS is {self._max_skipped}: no step is left to skip in {what}; "
                "lower SOLVER.BASE_LR, look at the images, or write a larger number"
            )
        self.skipped += 1
        logger.warning("Skipped step %d of at most %d, %s", self.skipped, self._max_skipped, what)

    def _report(self, iteration: int, batch: Any, bad: Mapping[str, float], before: Mapping[str, Any]) -> str:
        """Save the batch, and say in one line which it is, what is wrong, and where it is."""
        named = (f"{s.get('file_name', 'image without file')} (id {s.get('image_id')})" for s in batch)
        samples = ", ".join(named)
        losses = ", ".join(
            "the proposals are not finite" if name == "rpn" else f"{name} is {value}"
            for name, value in bad.items()
        )
        path = os.path.join(self._folder, f"nonfinite_{iteration:07d}_rank{comm.get_rank()}.pth")
        try:
            save_batch(path, self._task, self._bare, batch, before, iteration=iteration, losses=dict(bad))
        except OSError as error:
            return f"{losses} for {samples}; the batch cannot be saved in {path} ({error.strerror})"
        return f"{losses} for {samples}; batch and weights are in {path}"


def _read(losses: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the losses as numbers, read at once: each read waits for the GPU."""
    if not losses:
        return {"rpn": math.nan}
    numbers = torch.stack([loss.detach().float().sum() for loss in losses.values()]).tolist()
    return dict(zip(losses, numbers, strict=True))


def _all_gather(row: Sequence[float]) -> list[Sequence[float]]:
    """Return the rows of all processes, padded to one length, in one collective on the CPU."""
    if comm.get_world_size() == 1:
        return [row]
    length = 4 + _SHARED_LOSSES
    mine = torch.tensor([*row, *[0.0] * length][:length], dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(comm.get_world_size())]
    distributed.all_gather(rows, mine, group=global_gloo_group())
    return [other.tolist() for other in rows]
