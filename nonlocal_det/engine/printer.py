"""The line in the log that says how training goes."""

from __future__ import annotations

import torch
from detectron2.utils.events import CommonMetricPrinter, EventStorage, get_event_storage


class TrainingPrinter(CommonMetricPrinter):
    """Prints what Detectron2's printer does, and the epoch, which is the scalar "epoch" of the storage.

    Losses are those of training alone: those of an evaluation would be repeated until the next one.
    """

    _printed: int | None = None  # the last iteration that was printed

    def write(self) -> None:
        """Print a line, unless nothing has been trained since the last one."""
        storage = get_event_storage()
        latest = {name: value for name, (value, _) in storage.latest().items()}
        losses = [name for name in latest if "loss" in name and storage.smoothing_hints()[name]]
        trained = max((storage.latest()[name][1] for name in losses), default=None)
        if trained == self._printed:
            return
        self._printed = trained
        eta = self._get_eta(storage)
        memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
        parts = [
            f"eta: {eta}" if eta else "",
            f"epoch: {latest['epoch']:.2f}" if "epoch" in latest else "",
            f"iter: {storage.iter}",
            *(self._median(storage, name) for name in losses),
            *(self._median(storage, name) for name in latest if "[metric]" in name),
            f"time: {storage.history('time').global_avg():.4f}" if "time" in latest else "",
            f"last_time: {latest['time']:.4f}" if "time" in latest else "",
            f"data_time: {self._mean(storage, 'data_time'):.4f}" if "data_time" in latest else "",
            f"last_data_time: {latest['data_time']:.4f}" if "data_time" in latest else "",
            f"lr: {latest['lr']:.5g}" if "lr" in latest else "",
            f"max_mem: {memory:.0f}M" if memory is not None else "",
        ]
        self.logger.info(" %s", "  ".join(part for part in parts if part))

    def _median(self, storage: EventStorage, name: str) -> str:
        value = storage.history(name).median(storage.count_samples(name, self._window_size))
        return f"{name}: {value:.4g}"

    def _mean(self, storage: EventStorage, name: str) -> float:
        return storage.history(name).avg(storage.count_samples(name, self._window_size))
