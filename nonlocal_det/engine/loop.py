"""The training loop: a run as a list of parts, and one ``train()`` that is read from top to bottom."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, TrainerBase, create_ddp_model, default_writers
from detectron2.engine import hooks as upstream
from detectron2.evaluation import verify_results
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventStorage
from detectron2.utils.logger import setup_logger
from fvcore.common.history_buffer import HistoryBuffer
from fvcore.nn.precise_bn import get_bn_modules
from torch import distributed

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.engine import hooks
from nonlocal_det.engine.evaluation import evaluate, evaluate_augmented, metric_prefix
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.engine.printer import TrainingPrinter
from nonlocal_det.engine.state import RunState
from nonlocal_det.engine.step import TrainingStep
from nonlocal_det.engine.task import Task, find_task
from nonlocal_det.engine.validation import ValidationLoss
from nonlocal_det.errors import InputError, Preempted
from nonlocal_det.layers.kernels import settle_kernels
from nonlocal_det.modeling.build import build_model
from nonlocal_det.modeling.checks import check_loaded

#: Numbered checkpoints of a run that are kept, besides the final one and the best.
KEPT_CHECKPOINTS = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """Why training ends before SOLVER.MAX_ITER."""

    reason: str  # one line
    error: BaseException | None = None  # what Trainer.train raises; None where the run is done


class Trainer(TrainerBase):
    """Trains, evaluates, and keeps the best checkpoint as ``model_best.pth``.

    It is Detectron2's default recipe (its optimizer, schedule, hooks and writers) for any task, with strict
    loading of weights (:class:`NonLocalCheckpointer`), on GPUs and CPUs, and with exact resume
    (:class:`RunState`). "Best" is by the first of the task's scores on the first data set of DATASETS.TEST.

    Args:
        cfg: the config, checked by :func:`nonlocal_det.engine.task.check_run`. With
            SOLVER.REFERENCE_WORLD_SIZE, batch, rate and steps are scaled to the number of processes.
        allow_missing: regular expression for weights that may be missing (:class:`NonLocalCheckpointer`).
        task: the task; by default the config's.
        stop: says whether the run was asked to stop.

    Raises:
        ConfigError: a part of the model or the data is wrong.
    """

    def __init__(
        self,
        cfg: CfgNode,
        *,
        allow_missing: str = "",
        task: Task | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__()
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        self.cfg = cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        self.task = task or find_task(cfg)
        self.ending: Ending | None = None
        self.saved: int | None = None  # the iteration that was saved last
        self.max_iter = cfg.SOLVER.MAX_ITER
        self._stop = StopRequest() if stop is None else stop  # one that was not asked to stop is false

        model = build_model(cfg)
        logger.info("Model:\n%s", model)
        settle_kernels(model, *([torch.float16] if cfg.SOLVER.AMP.ENABLED else []))
        self.optimizer = build_optimizer(cfg, model)
        # SEED -1 draws one, which checkpoints keep.
        seed = cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
        self.data_loader = self.task.build_train_loader(cfg, seed)
        on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
        # Not the process's number on its machine: Slurm may show each process its own GPU alone.
        devices = None if on_cpu else [torch.cuda.current_device()]
        # Batch statistics are each process's own, as in Detectron2.
        self.model = create_ddp_model(model, broadcast_buffers=False, device_ids=devices)
        self.scheduler = build_lr_scheduler(cfg, self.optimizer)
        self.step = TrainingStep(
            *(self.model, self.data_loader, self.optimizer),
            task=self.task,
            folder=cfg.OUTPUT_DIR,
            max_skipped=cfg.SOLVER.SKIP_NONFINITE_STEPS,
            mixed_precision=cfg.SOLVER.AMP.ENABLED,
            stop=self._stop,
        )
        self.state = RunState(self)
        self.checkpointer = NonLocalCheckpointer(
            self.model, cfg.OUTPUT_DIR, allow_missing=allow_missing, keep=KEPT_CHECKPOINTS, trainer=self.state
        )
        self._validation_loss = ValidationLoss(cfg, self.task, self._stop) if cfg.TEST.VAL_LOSS else None
        self._results: OrderedDict[str, Any] = OrderedDict()  # of the last evaluation
        self.register_hooks(self._build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in OUTPUT_DIR, or start from MODEL.WEIGHTS.

        Args:
            resume: whether to go on from OUTPUT_DIR, if it holds a checkpoint.

        Raises:
            CheckpointError: the file is missing, damaged, or does not fit the model.
            ConfigError: an inserted block that no file gave weights to is frozen.
        """
        found = self.checkpointer.has_checkpoint()
        if found and not resume:
            logger.warning(
                "OUTPUT_DIR %s holds checkpoints of an earlier run, which this one will overwrite; --resume "
                "goes on from them, another OUTPUT_DIR keeps them",
                self.cfg.OUTPUT_DIR,
            )
        self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        if found and resume:
            self.start_iter = self.iter + 1  # the checkpoint has the iteration that was done
        model, fresh = self.checkpointer.model, self.checkpointer.fresh_blocks
        check_loaded(self.cfg, model, fresh, resumed=found and resume)

    def train(self) -> OrderedDict[str, Any] | None:
        """Train from ``start_iter`` to ``max_iter``, or until a hook or an error ends it.

        SIGTERM and SIGUSR1 make it save after the current iteration and raise :class:`Preempted`. They cut an
        evaluation short; the run that goes on starts with it.

        Returns:
            The results of the last evaluation in the main process, where TEST.EXPECTED_RESULTS checks them.

        Raises:
            Preempted: a signal has stopped the run, which is saved.
            BadDataError: too many samples cannot be used (DATALOADER.MAX_BAD_FRACTION).
            NonFiniteLossError: a loss is not finite (SOLVER.SKIP_NONFINITE_STEPS).
            CheckpointError: a checkpoint cannot be written.
        """
        logger.info("Starting training from iteration %d", self.start_iter)
        self.iter, self.ending = self.start_iter, None
        # What is recorded before the first step belongs to the last iteration of the run that goes on.
        with self._stop.listening(), EventStorage(max(self.start_iter - 1, 0)) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self.ending is None:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    if self.failed:
                        break
                    self.iter += 1
            except (InputError, Preempted) as error:
                self.end(str(error), error)
            except Exception as error:
                logger.exception("Exception during training:")
                self.end(str(error), error)
                raise
            finally:
                try:
                    self.after_train()
                finally:
                    self._close()
        if self.failed:
            raise self.ending.error
        if self._results and self.cfg.TEST.EXPECTED_RESULTS and comm.is_main_process():
            verify_results(self.cfg, self._results)
            return self._results
        return None

    def _close(self) -> None:
        """End what loads data, and forget what is kept of its files."""
        if isinstance(self.data_loader, TrainLoader):
            self.data_loader.close()
        self.task.release_data()

    @property
    def failed(self) -> bool:
        """Whether training ends by an error or a signal."""
        return self.ending is not None and self.ending.error is not None

    @property
    def stopping(self) -> bool:
        """Whether a process was asked to stop. Several look before backward, so that all know the same."""
        return self.step.stopping or (comm.get_world_size() == 1 and bool(self._stop))

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """Let training end after this iteration; hooks may call it. Of several errors the first counts.

        Args:
            reason: why, in one line.
            error: what :meth:`train` raises; the hooks that follow do not run in this iteration. None where
                the run is done.
        """
        if not self.failed:
            self.ending = Ending(reason, error)

    def save(self, name: str, iteration: int | None = None) -> None:
        """Save a checkpoint to go on from. All processes must call this; the main one writes.

        Args:
            name: the file's name without ``.pth``.
            iteration: the last one that was done; the current one by default.
        """
        here, self.iter = self.iter, self.iter if iteration is None else iteration
        self.state.gather()
        self.checkpointer.save(name, iteration=self.iter)
        self.saved, self.iter = self.iter, here

    def before_train(self) -> None:
        """Prepare the hooks; then set the random states of the run that is resumed."""
        # Its default is a million values of each metric: 150 MB in 90,000 iterations. Writers look at 20.
        self.storage._history.default_factory = partial(HistoryBuffer, max_length=1000)
        super().before_train()
        self.state.take_up()

    def run_step(self) -> None:
        """Do one step."""
        self.step(self.iter, self.storage)
        if isinstance(self.data_loader, TrainLoader):
            self.storage.put_scalar("epoch", self.data_loader.epoch, smoothing_hint=False)

    def after_step(self) -> None:
        """Run the hooks, until one ends training by an error."""
        for hook in self._hooks:
            hook.after_step()
            if self.failed:
                break

    def after_train(self) -> None:
        """Let the hooks finish: all of them, as some have files to close."""
        self.iter = min(self.iter, self.max_iter)  # a run that was finished before counts no iteration more
        self.storage.iter = self.iter
        for hook in self._hooks:
            try:
                hook.after_train()
            except (InputError, Preempted) as error:
                self.end(str(error), error)
            except OSError:
                # After an error it tells nothing new: a full disk fails the checkpoint and the writers alike.
                if not self.failed:
                    raise

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model as it is, on all processes; return scores and validation losses."""
        if comm.get_world_size() > 1:
            # Each process has batch norm statistics of its own. Those that are saved are evaluated.
            for buffer in self.checkpointer.model.buffers():
                distributed.broadcast(buffer, 0)
        self._results = evaluate(self.cfg, self.model, task=self.task, stop=self._stop)
        found = dict(self._results)
        if self._validation_loss is not None:
            for dataset, losses in self._validation_loss(self.checkpointer.model).items():
                prefix = metric_prefix(self.cfg, dataset)
                named = {f"{prefix}val/{key}": value for key, value in losses.items()}
                logger.info("%s", "  ".join(f"{key}: {value:.4g}" for key, value in named.items()))
                found.update(named)
        return found

    def _build_hooks(self) -> list[upstream.HookBase]:
        """Return the hooks, in the order in which they run: those of Detectron2, in forms that can resume.

        Evaluation comes after the checkpoint, so that one which fails costs no training, and the writer after
        all that measure, since it closes its files at the end of training.
        """
        cfg, period = self.cfg, self.cfg.TEST.EVAL_PERIOD
        found = [upstream.IterationTimer(), upstream.LRScheduler()]
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.model):
            few = cfg.clone()
            few.defrost()
            few.DATALOADER.NUM_WORKERS = 0
            # Its position is set before each use, and its seed with it.
            loader = self.task.build_train_loader(few, 0)
            found.append(hooks.PreciseBN(period, self.model, loader, cfg.TEST.PRECISE_BN.NUM_ITER))
        found.append(hooks.PeriodicCheckpointer(cfg.SOLVER.CHECKPOINT_PERIOD))
        found.append(hooks.EvalHook(period, self.evaluate))
        best = None
        if cfg.DATASETS.TEST and comm.is_main_process():
            metric = metric_prefix(cfg, cfg.DATASETS.TEST[0]) + self.task.scores(cfg)[0]
            best = hooks.BestCheckpointer(period, hooks.best_keeper(self.checkpointer), metric)
            found.append(best)
        if cfg.SOLVER.EARLY_STOP_PATIENCE:
            found.append(hooks.EarlyStopping(period, cfg.SOLVER.EARLY_STOP_PATIENCE, best))
        if cfg.TEST.AUG.ENABLED:
            augmented = partial(evaluate_augmented, cfg, self.model, task=self.task, stop=self._stop)
            found.append(hooks.EvalHook(0, augmented))
        if comm.is_main_process():
            writers = [
                TrainingPrinter(self.max_iter) if type(writer) is CommonMetricPrinter else writer
                for writer in default_writers(cfg.OUTPUT_DIR, self.max_iter)
            ]
            found.append(hooks.PeriodicWriter(writers, period))
            found.append(hooks.CurveDrawer(cfg.OUTPUT_DIR))
        return found
