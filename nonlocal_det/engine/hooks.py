"""Hooks that leave a run able to go on exactly: what they do and remember is in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detectron2.engine import HookBase, hooks

from nonlocal_det.engine.preemption import Preempted

__all__ = ["BestCheckpointer", "EvalHook", "PeriodicCheckpointer", "PreciseBN"]


class PeriodicCheckpointer(HookBase):
    """Saves a checkpoint every ``period`` iterations, and ``model_final`` after the last.

    Unlike Detectron2's it runs in all processes, since each gives its random states. When one of them has
    been sent a signal to stop, all save and leave training, which raises :class:`Preempted`.

    Args:
        period: number of iterations.
    """

    def __init__(self, period: int) -> None:
        self._period = period

    def after_step(self) -> None:
        """Save, if it is time to."""
        stop = self.trainer.stopping
        done, name = self.trainer.iter + 1, f"model_{self.trainer.iter:07d}"
        if done == self.trainer.max_iter:
            name = "model_final"
        if stop or done == self.trainer.max_iter or done % self._period == 0:
            self.trainer.save(name)
        if stop:
            self.trainer.leave(
                Preempted(
                    f"stopped by a signal after {done} of {self.trainer.max_iter} iterations and saved "
                    f"{name}.pth; --resume goes on from it"
                )
            )


class EvalHook(hooks.EvalHook):
    """Evaluates as Detectron2's does, and makes up for an evaluation that a stopped run still owed.

    Checkpoints are saved before the evaluation that is due at the same iteration, so that one which fails
    costs no training. A run that goes on from such a checkpoint therefore starts with the evaluation.
    """

    def before_train(self) -> None:
        """Evaluate, if the run goes on from an iteration that ends with an evaluation."""
        if _owes_evaluation(self.trainer, self._period):
            start = self.trainer.start_iter
            self.trainer.storage.iter = start - 1  # under which it would have been recorded
            self._do_eval()
            self.trainer.storage.iter = start

    def after_train(self) -> None:
        """Evaluate after the last iteration, unless the run is stopped there."""
        if not self.trainer.left:
            super().after_train()


class BestCheckpointer(hooks.BestCheckpointer):
    """Keeps the best checkpoint as Detectron2's does, and remembers its score when the run is resumed."""

    def before_train(self) -> None:
        """Compare the evaluation that a stopped run still owed."""
        if _owes_evaluation(self.trainer, self._period):
            self._best_checking()

    def after_train(self) -> None:
        """Compare the last evaluation, unless the run is stopped before it."""
        if not self.trainer.left:
            super().after_train()

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, and its iteration."""
        if self.best_metric is None:
            return {}
        return {"metric": self._val_metric, "best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the best score.

        Args:
            state_dict: what :meth:`state_dict` returned; the score of another metric is no measure.
        """
        if state_dict["metric"] == self._val_metric:
            self.best_metric, self.best_iter = state_dict["best_metric"], state_dict["best_iter"]


class PreciseBN(hooks.PreciseBN):
    """Runs Detectron2's over the batches that training will see next, so that where it reads is known."""

    def update_stats(self) -> None:
        """Replace the running statistics of batch norms by exact ones."""
        if not self._disabled:
            self._data_loader.load_state_dict(self.trainer.data_loader.state_dict())
            self._data_iter = None
        super().update_stats()


def _owes_evaluation(trainer: Any, period: int) -> bool:
    start = trainer.start_iter
    return period > 0 and 0 < start < trainer.max_iter and start % period == 0
