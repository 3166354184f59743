"""Hooks that leave a run able to go on exactly: what they do and remember is in its checkpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import EventWriter

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.engine.curves import draw_curves
from nonlocal_det.errors import Preempted, one_line

logger = logging.getLogger(__name__)


class PeriodicCheckpointer(HookBase):
    """Saves a checkpoint every ``period`` iterations, and ``model_final`` after the last.

    Unlike Detectron2's it runs in all processes, since each gives its random states. When one of them was
    asked to stop, all save, and training ends by :class:`Preempted`.
    """

    def __init__(self, period: int) -> None:
        self._period = period

    def after_step(self) -> None:
        """Save, if it is time to."""
        trainer, done = self.trainer, self.trainer.iter + 1
        name = "model_final" if done == trainer.max_iter else f"model_{trainer.iter:07d}"
        if trainer.stopping or done == trainer.max_iter or done % self._period == 0:
            trainer.save(name)
        if trainer.stopping:
            reason = f"stopped by a signal after {done} of {trainer.max_iter} iterations and saved {name}.pth"
            trainer.end(reason, Preempted(f"{reason}; --resume goes on from it"))


class EvalHook(hooks.EvalHook):
    """Evaluates as Detectron2's does, and catches up on an evaluation that a stopped run did not reach.

    Checkpoints are saved before the evaluation of the same iteration, so that one which fails costs no
    training. A run that goes on from such a checkpoint therefore starts with the evaluation.
    """

    _evaluated: int | None = None  # the iteration of the last evaluation

    def _do_eval(self) -> None:
        super()._do_eval()
        self._evaluated = self.trainer.storage.iter

    def before_train(self) -> None:
        """Evaluate, if the run goes on from an iteration that ends with an evaluation."""
        start = self.trainer.start_iter
        due = self._period > 0 and 0 < start < self.trainer.max_iter and start % self._period == 0
        if due and self._evaluated != start - 1:
            self._do_eval()

    def after_step(self) -> None:
        """Evaluate, if it is time to. A signal meanwhile ends training; its last iteration is saved."""
        try:
            super().after_step()
        except Preempted:
            trainer = self.trainer
            if trainer.saved != trainer.iter:
                trainer.save(f"model_{trainer.iter:07d}")
            raise Preempted(
                f"stopped by a signal in the evaluation after {trainer.iter + 1} of {trainer.max_iter} "
                "iterations, of which the last is saved; --resume goes on with it"
            ) from None

    def after_train(self) -> None:
        """Evaluate after the last iteration, unless the run fails there or has been evaluated."""
        ending = self.trainer.ending
        if ending is None or (ending.error is None and self._period == 0):
            super().after_train()

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration of the last evaluation."""
        return {} if self._evaluated is None else {"evaluated": self._evaluated}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._evaluated = state_dict["evaluated"]


def best_keeper(checkpointer: NonLocalCheckpointer) -> NonLocalCheckpointer:
    """Return a checkpointer for the best model of a run, which is not one to resume from."""
    state = checkpointer.checkpointables["trainer"]
    keeper = _BestKeeper(checkpointer.model, checkpointer.save_dir, trainer=state)
    keeper.index = checkpointer.index
    return keeper


class _BestKeeper(NonLocalCheckpointer):
    resumable = False

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Leave ``last_checkpoint`` as it is."""


class BestCheckpointer(hooks.BestCheckpointer):
    """Keeps the best checkpoint as Detectron2's does, and remembers its score when the run is resumed."""

    since_best = 0  # evaluations since the best one

    @property
    def metric(self) -> str:
        """Name of the score."""
        return self._val_metric

    def before_train(self) -> None:
        """Compare the scores of an evaluation that was caught up on."""
        if self._val_metric in self.trainer.storage.latest():
            self._best_checking()

    def after_train(self) -> None:
        """Compare the last evaluation, unless the run ends before it."""
        if self.trainer.ending is None:
            super().after_train()

    def _best_checking(self) -> None:
        before = self.best_iter
        super()._best_checking()
        score, _ = self.trainer.storage.latest().get(self._val_metric, (math.nan, 0))
        if self.best_iter != before:
            self.since_best = 0
        elif math.isfinite(score):
            self.since_best += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, its iteration, and the number of evaluations since."""
        if self.best_metric is None:
            return {}
        found = {name: getattr(self, name) for name in ("best_metric", "best_iter", "since_best")}
        return {"metric": self._val_metric, **found}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, unless it is of another metric."""
        if state_dict["metric"] == self._val_metric:
            self.best_metric, self.best_iter = state_dict["best_metric"], state_dict["best_iter"]
            self.since_best = state_dict.get("since_best", 0)


class EarlyStopping(HookBase):
    """Ends training in all processes when the best score has not been beaten for some evaluations.

    It comes after the hooks that evaluate and compare. A run that it has ended ends at once when it is
    resumed, unless the patience has changed.

    Args:
        period: number of iterations between evaluations.
        patience: number of evaluations.
        best: the hook that compares the scores; None in processes other than the main one.
    """

    def __init__(self, period: int, patience: int, best: BestCheckpointer | None) -> None:
        self._period, self._patience, self._best = period, patience, best
        self._warned = self._stopped = False

    def before_train(self) -> None:
        """Look at the scores of the run that is resumed, unless it has reached its end."""
        if self.trainer.start_iter < self.trainer.max_iter:
            self._look(self.trainer.start_iter)

    def after_step(self) -> None:
        """Look after an evaluation."""
        done = self.trainer.iter + 1
        if done % self._period == 0 and done != self.trainer.max_iter:
            self._look(done)
            if self._best is not None and self._best.best_metric is None and not self._warned:
                self._warned = True
                logger.warning(
                    "SOLVER.EARLY_STOP_PATIENCE is %d: no effect so far, as there is no %s",
                    *(self._patience, self._best.metric),
                )

    def after_train(self) -> None:
        """Save the iteration that has become the last, unless it was saved before."""
        trainer = self.trainer
        if not self._stopped or trainer.failed:
            return
        loaded = trainer.checkpointer.report.path if trainer.checkpointer.report else ""
        if trainer.max_iter > trainer.start_iter or os.path.basename(loaded) != "model_final.pth":
            trainer.save("model_final", trainer.max_iter - 1)
        logger.info("%s", trainer.ending.reason)

    def _look(self, done: int) -> None:
        reason, best = "", self._best
        if best is not None and best.since_best >= self._patience:
            since = f"{best.since_best} evaluations" if best.since_best > 1 else "evaluation"
            reason = (
                f"Training was stopped early after {done} of {self.trainer.max_iter} iterations: the best "
                f"{best.metric}, {best.best_metric:.2f} after {best.best_iter + 1}, was not beaten by the "
                f"{since} since (SOLVER.EARLY_STOP_PATIENCE is {self._patience}; with more, or 0, --resume "
                "trains on)"
            )
        if reason := comm.all_gather(reason)[0]:
            self._stopped, self.trainer.max_iter = True, done
            self.trainer.end(reason)


class PeriodicWriter(hooks.PeriodicWriter):
    """Writes as Detectron2's does, and after every evaluation (``eval_period``), as only the last is kept."""

    def __init__(self, writers: Sequence[EventWriter], eval_period: int) -> None:
        super().__init__(writers)
        self._eval_period = eval_period

    def before_train(self) -> None:
        """Write the scores of an evaluation that was caught up on."""
        if self.trainer.storage.latest():
            self._write()

    def after_step(self) -> None:
        """Write, if it is time to."""
        if self._eval_period > 0 and (self.trainer.iter + 1) % self._eval_period == 0:
            self._write()
        else:
            super().after_step()

    def _write(self) -> None:
        for writer in self._writers:
            writer.write()


class CurveDrawer(HookBase):
    """Draws ``curves.png`` of ``metrics.json``, in one folder, at the end; it comes after their writer."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def after_train(self) -> None:
        """Draw, if the run is done. It does not fail where the drawing does."""
        if self.trainer.failed or self.trainer.iter < self.trainer.max_iter:
            return
        source, target = (os.path.join(self._folder, name) for name in ("metrics.json", "curves.png"))
        try:
            draw_curves(source, target)
        except Exception as error:
            logger.warning("%s cannot be drawn (%s: %s)", target, type(error).__name__, one_line(error))


class PreciseBN(hooks.PreciseBN):
    """Measures the batches that training will see next, so that it follows from the training's position."""

    def update_stats(self) -> None:
        """Replace the running statistics of batch norms by exact ones."""
        if not self._disabled:
            self._data_loader.load_state_dict(self.trainer.data_loader.state_dict())
            self._data_iter = None
        super().update_stats()
