"""Detectron2's default trainer with COCO evaluation, the best checkpoint, strict loading, and CPUs."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from detectron2.config import CfgNode
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
)
from detectron2.engine import hooks as upstream
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventWriter
from detectron2.utils.logger import setup_logger
from fvcore.common.history_buffer import HistoryBuffer
from fvcore.nn.precise_bn import get_bn_modules
from torch import distributed, nn

from nonlocal_det.checkpoint import NonLocalCheckpointer
from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.data.random_states import isolated_randomness, random_states, set_random_states
from nonlocal_det.engine import hooks
from nonlocal_det.engine.nonfinite import LossGuard
from nonlocal_det.engine.preemption import StoppableLoader, stop_request
from nonlocal_det.engine.printer import TrainingPrinter
from nonlocal_det.engine.task import find_task
from nonlocal_det.engine.validation import ValidationLoss
from nonlocal_det.errors import (
    BadDataError,
    CheckpointError,
    ConfigError,
    ImageError,
    NonFiniteLossError,
    Preempted,
)
from nonlocal_det.modeling.build import build_model

__all__ = ["Trainer"]

#: Numbered checkpoints of a run that are kept, besides the final one and the best.
KEPT_CHECKPOINTS = 3

#: What is no fault of the program, and ends training without a traceback.
_EXPECTED_ERRORS = (
    BadDataError,
    CheckpointError,
    ConfigError,
    ImageError,
    NonFiniteLossError,
    Preempted,
)

logger = logging.getLogger(__name__)


class Trainer(DefaultTrainer):
    """Trains, evaluates on COCO-format data, and keeps the best checkpoint as ``model_best.pth``.

    It differs from :class:`DefaultTrainer` in that it has an evaluator, loads weights strictly
    (:class:`NonLocalCheckpointer`), also trains with several processes on CPUs, and refuses settings that
    cannot work before a model is built. "Best" is by mask AP on the first data set of DATASETS.TEST, or else
    by keypoint AP, or else by box AP.

    With TEST.VAL_LOSS each evaluation also computes the losses on DATASETS.TEST (:class:`ValidationLoss`).
    With SOLVER.EARLY_STOP_PATIENCE training ends once the best score is that many evaluations old. At the
    end ``curves.png`` is drawn from ``metrics.json``.

    A run that was stopped and resumed goes on exactly: on a CPU, with up to two processes, it ends with the
    same bits. A checkpoint holds the position in the training data (:class:`TrainLoader`) and the random
    states of each process besides what Detectron2 saves; evaluation draws no random number from training.
    SIGTERM and SIGUSR1 make :meth:`train` save after the current iteration and raise :class:`Preempted`. They
    cut an evaluation short, and the run that goes on makes up for it.

    Args:
        cfg: the config. With SOLVER.REFERENCE_WORLD_SIZE, batch, rate and steps are scaled to the number of
            processes, and the log says to what.
        allow_missing: regular expression for weights that may be missing (:class:`NonLocalCheckpointer`).

    Raises:
        ConfigError: a setting cannot work here.
        CheckpointError: ``allow_missing`` is not a regular expression.
    """

    def __init__(self, cfg: CfgNode, *, allow_missing: str = "") -> None:
        # The parent's own __init__ names a GPU for DistributedDataParallel, which raises on CPUs, so it is
        # passed over and the same parts are put together here.
        TrainerBase.__init__(self)
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        processes = comm.get_world_size()
        self.cfg = cfg = self.auto_scale_workers(cfg, processes)
        self.stopping = False  # whether a process was asked to stop after this iteration
        self.left = False  # whether training was left before its end
        self.stopped_early = ""  # why it ends before SOLVER.MAX_ITER (SOLVER.EARLY_STOP_PATIENCE)
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER

        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
        # Batch statistics are each process's own, as in Detectron2.
        # Not the process's number on its machine: Slurm may show each process its own GPU alone.
        devices = None if on_cpu else [torch.cuda.current_device()]
        model = create_ddp_model(model, broadcast_buffers=False, device_ids=devices)
        loop = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self._trainer = loop(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self._random_states: list[dict[str, Any]] = []  # of all processes, while a checkpoint is saved
        self._resumed_states: dict[str, Any] | None = None  # of this process, until training starts
        self._saved: int | None = None  # the iteration that was saved last
        self.checkpointer = NonLocalCheckpointer(
            model,
            cfg.OUTPUT_DIR,
            allow_missing=allow_missing,
            keep=KEPT_CHECKPOINTS,
            trainer=weakref.proxy(self),
        )
        self._guard = LossGuard(model, cfg.OUTPUT_DIR, cfg.SOLVER.SKIP_NONFINITE_STEPS)
        self._validation_loss = ValidationLoss(cfg) if cfg.TEST.VAL_LOSS else None
        self.register_hooks(self.build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in OUTPUT_DIR, or start from MODEL.WEIGHTS.

        Args:
            resume: whether to go on from OUTPUT_DIR; where it holds no checkpoint, training starts.

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
        super().resume_or_load(resume)
        if (
            not (found and resume)
            and not self.cfg.MODEL.WEIGHTS
            and self.cfg.MODEL.RESNETS.NORM == "FrozenBN"
        ):
            logger.warning(
                'MODEL.WEIGHTS is empty and MODEL.RESNETS.NORM is "FrozenBN", which does nothing to random '
                "weights: deep nets overflow. Give weights, or train from scratch with MODEL.RESNETS.NORM "
                '"BN" and MODEL.BACKBONE.FREEZE_AT 0'
            )
        self._refuse_dead_blocks()

    def _refuse_dead_blocks(self) -> None:
        """Refuse to train with a block that starts as an identity and cannot change."""
        for name in self.checkpointer.fresh_blocks:
            block = self.checkpointer.model.get_submodule(name)
            if any(parameter.requires_grad for parameter in block.parameters()):
                continue
            found = re.search(r"(?:^|\.)res([2-5])\.(non_local|residual)_\d+$", name)
            if found is None:
                raise ConfigError(f"the new block {name} is frozen, so it would stay an identity")
            stage, kind = int(found[1]), found[2].replace("_", "-")
            raise ConfigError(
                f"MODEL.BACKBONE.FREEZE_AT is {self.cfg.MODEL.BACKBONE.FREEZE_AT}: it freezes res{stage} and "
                f"the new {kind} block {name} in it, which would stay an identity; write "
                f"MODEL.BACKBONE.FREEZE_AT {stage - 1} or less, leave MODEL.NONLOCAL.RES{stage} empty, or "
                "give MODEL.WEIGHTS that hold the block"
            )

    def train(self) -> OrderedDict[str, Any] | None:
        """Run training.

        Returns:
            The results of the last evaluation in the main process, where TEST.EXPECTED_RESULTS checks them.

        Raises:
            Preempted: a signal has stopped the run, which is saved.
            BadDataError: too many images cannot be used (DATALOADER.MAX_BAD_FRACTION).
            NonFiniteLossError: a loss is not finite (SOLVER.SKIP_NONFINITE_STEPS).
            CheckpointError: a checkpoint cannot be written.
        """
        self.left = False
        try:
            with stop_request().listening():
                return super().train()
        except _Leave as leave:
            error = leave.error
        finally:
            if isinstance(self.data_loader, TrainLoader):
                self.data_loader.close()
        if error is not None:
            raise error
        results = getattr(self, "_last_eval_results", None)
        if results and self.cfg.TEST.EXPECTED_RESULTS and comm.is_main_process():
            verify_results(self.cfg, results)
            return results
        return None

    def leave(self, error: Exception) -> NoReturn:
        """Leave training for a reason that is no fault of the program: without a traceback in the log.

        Args:
            error: what :meth:`train` raises.
        """
        self.left = True
        raise _Leave(error)

    @contextmanager
    def _leaving_by_error(self) -> Iterator[None]:
        """Leave training for what is no fault of the program."""
        try:
            yield
        except _EXPECTED_ERRORS as error:
            self.leave(error)

    def _stop_early(self) -> NoReturn:
        """Make the iteration that is done the last one of the run."""
        self.max_iter = self.iter + 1
        loaded = self.checkpointer.report.path if self.checkpointer.report else ""
        if self.iter >= self.start_iter or os.path.basename(loaded) != "model_final.pth":
            with self._leaving_by_error():
                self.save("model_final")
        logger.info("%s", self.stopped_early)
        raise _Leave(None)

    def save(self, name: str) -> None:
        """Save a checkpoint to go on from. All processes must call this; the main one writes.

        Args:
            name: the file's name without ``.pth``.
        """
        self._random_states = comm.gather(random_states())
        self.checkpointer.save(name, iteration=self.iter)
        self._random_states = []
        self._saved = self.iter

    def before_train(self) -> None:
        """Prepare the hooks; then take up the random states of the run that is resumed."""
        # Its default is a million values of each metric: 150 MB in 90,000 iterations. Writers look at 20.
        self.storage._history.default_factory = partial(HistoryBuffer, max_length=1000)
        with self._leaving_by_error():
            super().before_train()
        if self._resumed_states is not None:
            set_random_states(self._resumed_states)
            self._resumed_states = None
        if self.stopped_early:
            self.iter = self.start_iter - 1
            self._stop_early()

    def run_step(self) -> None:
        """Do one step, or skip it in all processes if a loss of one is not finite."""
        self._trainer.iter = self.iter
        with self._leaving_by_error():
            self._guard.run(self._trainer.run_step, self.iter)

    def after_step(self) -> None:
        """Tell the other processes what each alone can know, and run the hooks."""
        loader = self.data_loader if isinstance(self.data_loader, TrainLoader) else None
        stop = bool(stop_request())
        said = comm.all_gather((stop, loader.take_bad() if loader else []))
        self.stopping = any(stop for stop, _ in said)
        with self._leaving_by_error():
            if loader:
                loader.count_bad(image for _, images in said for image in images)
                self.storage.put_scalar("epoch", loader.epoch, smoothing_hint=False)
            try:
                super().after_step()
            except Preempted:
                done, name = self.iter + 1, f"model_{self.iter:07d}"
                if self._saved != self.iter:
                    self.save(name)
                raise Preempted(
                    f"stopped by a signal in the evaluation after {done} of {self.max_iter} iterations, of "
                    "which the last is saved; --resume goes on with it"
                ) from None
            if self.stopped_early:
                self._stop_early()

    def after_train(self) -> None:
        """Let the hooks finish; a run that was finished before counts no iteration more."""
        self.iter = self.max_iter if self.stopped_early else min(self.iter, self.max_iter)
        try:
            with self._leaving_by_error():
                super().after_train()
        except _Leave:  # in the last evaluation: the hooks after it have files to close
            super().after_train()
            raise
        except OSError:
            if not self.left:  # else a full disk, which keeps a checkpoint from being written, shows here too
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on, but for the model's weights."""
        state = super().state_dict()
        state["hooks"] = {name: found for name, hook in _named(self._hooks) if (found := hook.state_dict())}
        if isinstance(self.data_loader, TrainLoader):
            state["data"] = self.data_loader.state_dict()
        state["random_states"] = self._random_states
        state["skipped_steps"] = self._guard.skipped
        # RetinaNet's and FCOS's moving average of positive anchors, which is no buffer.
        state["loss_normalizer"] = vars(self.checkpointer.model).get("loss_normalizer")
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the trainer's state. What cannot be restored exactly is logged.

        Args:
            state_dict: what :meth:`state_dict` returned, or Detectron2's.

        Raises:
            CheckpointError: it belongs to a run with other parameters.
        """
        state = dict(state_dict)
        states = state.pop("hooks", {})
        try:
            super().load_state_dict(state)
            for name, hook in _named(self._hooks):
                if name in states:
                    hook.load_state_dict(states[name])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"OUTPUT_DIR {self.cfg.OUTPUT_DIR}: its last checkpoint cannot be resumed with this config: "
                f"{error}; use that run's config, or give it as MODEL.WEIGHTS and a new OUTPUT_DIR"
            ) from error
        self._guard.skipped = state.get("skipped_steps", 0)
        if state.get("loss_normalizer") is not None:
            self.checkpointer.model.loss_normalizer = state["loss_normalizer"]
        if isinstance(self.data_loader, TrainLoader):
            if "data" in state:
                self.data_loader.load_state_dict(state["data"])
            else:
                self.data_loader.skip((self.iter + 1) * self.cfg.SOLVER.IMS_PER_BATCH)
        found = state.get("random_states", ())
        if len(found) == comm.get_world_size():
            self._resumed_states = found[comm.get_rank()]
        else:
            logger.warning(
                "The checkpoint has random states for %d processes, and there are %d: the run goes on, but "
                "not bit for bit as before",
                len(found),
                comm.get_world_size(),
            )

    def build_hooks(self) -> list[HookBase | None]:
        """Return the hooks, in the order in which they run: those of Detectron2, in forms that can resume.

        Evaluation comes after the checkpoint, so that one which fails costs no training, and the writer after
        all that measure, since it closes its files at the end of training.
        """
        cfg, found = self.cfg, [upstream.IterationTimer(), upstream.LRScheduler()]
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.model):
            few = cfg.clone()
            few.defrost()
            few.DATALOADER.NUM_WORKERS = 0
            loader = self.build_train_loader(few)
            found.append(
                hooks.PreciseBN(cfg.TEST.EVAL_PERIOD, self.model, loader, cfg.TEST.PRECISE_BN.NUM_ITER)
            )
        found.append(hooks.PeriodicCheckpointer(cfg.SOLVER.CHECKPOINT_PERIOD))
        found.append(hooks.EvalHook(cfg.TEST.EVAL_PERIOD, self._evaluate))
        best = None
        if cfg.DATASETS.TEST and comm.is_main_process():
            trainer = self.checkpointer.checkpointables["trainer"]
            keeper = _BestKeeper(self.checkpointer.model, cfg.OUTPUT_DIR, trainer=trainer)
            keeper.index = self.checkpointer.index
            best = hooks.BestCheckpointer(cfg.TEST.EVAL_PERIOD, keeper, _best_metric(cfg))
            found.append(best)
        if cfg.SOLVER.EARLY_STOP_PATIENCE:
            found.append(hooks.EarlyStopping(cfg.TEST.EVAL_PERIOD, cfg.SOLVER.EARLY_STOP_PATIENCE, best))
        if cfg.TEST.AUG.ENABLED:
            found.append(hooks.EvalHook(0, lambda: self.test_with_tta(self.cfg, self.model)))
        if comm.is_main_process():
            found.append(hooks.PeriodicWriter(self.build_writers(), cfg.TEST.EVAL_PERIOD))
            found.append(hooks.CurveDrawer(cfg.OUTPUT_DIR))
        return found

    def build_writers(self) -> list[EventWriter]:
        """Return Detectron2's writers, of which the one for the log also has the epoch."""
        return [
            TrainingPrinter(self.max_iter) if type(writer) is CommonMetricPrinter else writer
            for writer in super().build_writers()
        ]

    def _evaluate(self) -> dict[str, Any]:
        if comm.get_world_size() > 1:
            # Batch norms keep statistics of their own in each process. Those that are saved are evaluated.
            for buffer in self.checkpointer.model.buffers():
                distributed.broadcast(buffer, 0)
        self._last_eval_results = self.test(self.cfg, self.model)
        if self._validation_loss is None:
            return self._last_eval_results
        losses = {}
        for dataset, found in self._validation_loss(self.checkpointer.model).items():
            named = {f"{_prefix(self.cfg, dataset)}val/{key}": value for key, value in found.items()}
            logger.info("%s", "  ".join(f"{key}: {value:.4g}" for key, value in named.items()))
            losses.update(named)
        return {**self._last_eval_results, **losses}

    @classmethod
    def test(
        cls,
        cfg: CfgNode,
        model: nn.Module,
        evaluators: DatasetEvaluator | list[DatasetEvaluator] | None = None,
    ) -> OrderedDict[str, Any]:
        """Evaluate, and leave the random states as they were.

        Args:
            cfg: the config.
            model: the model.
            evaluators: one for each data set of DATASETS.TEST; those of :meth:`build_evaluator` by default.

        Returns:
            Results by task and metric; by data set first if there are several.

        Raises:
            ImageError: a picture cannot be read.
            Preempted: a signal to one of the processes has cut the evaluation short.
        """
        training = model.training
        with isolated_randomness():
            try:
                return super().test(cfg, model, evaluators)
            finally:
                model.train(training)  # which Detectron2 leaves to evaluations that end

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable[list[dict[str, Any]]]:
        """Return the loader of training data, which can go on from where another one stopped.

        Args:
            cfg: the config. SEED -1 draws a seed, which checkpoints keep.

        Raises:
            ConfigError: images without a size are to be grouped by it.
        """
        seed = cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
        return find_task(cfg).build_train_loader(cfg, seed)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Iterable[list[dict[str, Any]]]:
        """Return the loader of data to evaluate on.

        Args:
            cfg: the config.
            dataset_name: a registered data set.

        Raises:
            ConfigError: a picture lies outside the image folder (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT).
        """
        return StoppableLoader(find_task(cfg).build_test_loader(cfg, dataset_name))

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Build and log the model.

        Args:
            cfg: the config.

        Raises:
            ConfigError: a part of it is not registered, parts do not fit, or a non-local block has no place.
        """
        return build_model(cfg, super().build_model)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        """Return COCO's evaluator for what the model predicts: boxes, and masks and keypoints if on.

        Args:
            cfg: the config.
            dataset_name: a data set in COCO's format, or one that can be converted to it.
            output_folder: where predictions go; OUTPUT_DIR/inference by default.
        """
        folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
        if len(cfg.DATASETS.TEST) > 1:
            folder = os.path.join(folder, dataset_name)  # or each data set would overwrite the one before
        return find_task(cfg).build_evaluator(cfg, dataset_name, folder)

    @classmethod
    def test_with_tta(cls, cfg: CfgNode, model: nn.Module) -> OrderedDict[str, Any]:
        """Evaluate with test-time augmentation (TEST.AUG).

        Args:
            cfg: the config.
            model: a :class:`GeneralizedRCNN` without keypoints.

        Returns:
            The results of :meth:`test`, each key with "_TTA" after it.
        """
        logger.info("Evaluating with test-time augmentation")
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((f"{key}_TTA", value) for key, value in results.items())


class _Leave(BaseException):
    """Passes Detectron2's training loop, which logs every Exception; without an error the run is finished."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(error)
        self.error = error


def _named(found: list[HookBase]) -> Iterator[tuple[str, HookBase]]:
    """Name hooks by their class, as Detectron2 does, and the second and later of a class by number too."""
    counts: Counter[str] = Counter()
    for hook in found:
        name = type(hook).__qualname__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}#{counts[name]}"), hook


class _BestKeeper(NonLocalCheckpointer):
    """Saves the best checkpoint without making it the one to resume from."""

    resumable = False

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Leave ``last_checkpoint`` as it is."""


def _tasks(cfg: CfgNode) -> tuple[str, ...]:
    # Named, not found from the predictions: a model that finds nothing yet still gets its score, NaN.
    return (
        "bbox",
        *(("segm",) if cfg.MODEL.MASK_ON else ()),
        *(("keypoints",) if cfg.MODEL.KEYPOINT_ON else ()),
    )


def _best_metric(cfg: CfgNode) -> str:
    return f"{_prefix(cfg, cfg.DATASETS.TEST[0])}{find_task(cfg).scores(cfg)[0]}"


def _prefix(cfg: CfgNode, dataset: str) -> str:
    # With one data set, Detectron2 leaves its name out of the metrics.
    return f"{dataset}/" if len(cfg.DATASETS.TEST) > 1 else ""
