"""Detectron2's default trainer with COCO evaluation, the best checkpoint, strict loading, and CPUs."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
    hooks,
)
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from nonlocal_det.checkpoint import CheckpointError, NonLocalCheckpointer
from nonlocal_det.config import ConfigError
from nonlocal_det.engine.checks import check_training
from nonlocal_det.evaluation import COCOEvaluator

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer(DefaultTrainer):
    """Trains, evaluates on COCO-format data, and keeps the best checkpoint as ``model_best.pth``.

    It differs from :class:`DefaultTrainer` in that it has an evaluator, loads weights strictly
    (:class:`NonLocalCheckpointer`), also trains with several processes on CPUs, and refuses settings that
    cannot work before a model is built. "Best" is by mask AP on the first data set of DATASETS.TEST, or else
    by keypoint AP, or else by box AP.

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
        check_training(cfg, processes)
        self.cfg = cfg = self.auto_scale_workers(cfg, processes)
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER

        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
        # Batch statistics are each process's own, as in Detectron2.
        model = create_ddp_model(model, broadcast_buffers=False, **({"device_ids": None} if on_cpu else {}))
        loop = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self._trainer = loop(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = NonLocalCheckpointer(
            model, cfg.OUTPUT_DIR, allow_missing=allow_missing, trainer=weakref.proxy(self)
        )
        self.register_hooks(self.build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in OUTPUT_DIR, or start from MODEL.WEIGHTS.

        Args:
            resume: whether to go on from OUTPUT_DIR; where it holds no checkpoint, training starts.

        Raises:
            CheckpointError: the file is missing, damaged, or does not fit the model.
            ConfigError: a non-local block that no file gave weights to is frozen.
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
            found = re.search(r"(?:^|\.)res([2-5])\.non_local_\d+$", name)
            if found is None:
                raise ConfigError(f"the new non-local block {name} is frozen, so it would stay an identity")
            stage = int(found[1])
            raise ConfigError(
                f"MODEL.BACKBONE.FREEZE_AT is {self.cfg.MODEL.BACKBONE.FREEZE_AT}: it freezes res{stage} and "
                f"the new non-local block {name} in it, which would stay an identity; write "
                f"MODEL.BACKBONE.FREEZE_AT {stage - 1} or less, leave MODEL.NONLOCAL.RES{stage} empty, or "
                "give MODEL.WEIGHTS that hold the block"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the trainer's state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            CheckpointError: it belongs to a run with other parameters.
        """
        try:
            super().load_state_dict(state_dict)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"OUTPUT_DIR {self.cfg.OUTPUT_DIR}: its last checkpoint cannot be resumed with this config: "
                f"{error}; use that run's config, or give it as MODEL.WEIGHTS and a new OUTPUT_DIR"
            ) from error

    def build_hooks(self) -> list[HookBase | None]:
        """Return Detectron2's hooks, with those for the best checkpoint and test-time augmentation.

        Returns:
            The hooks, in the order in which they run.
        """
        found = super().build_hooks()
        added: list[HookBase] = []
        if self.cfg.DATASETS.TEST and comm.is_main_process():
            keeper = _BestKeeper(
                self.checkpointer.model,
                self.cfg.OUTPUT_DIR,
                trainer=self.checkpointer.checkpointables["trainer"],
            )
            added.append(hooks.BestCheckpointer(self.cfg.TEST.EVAL_PERIOD, keeper, _best_metric(self.cfg)))
        if self.cfg.TEST.AUG.ENABLED:
            added.append(hooks.EvalHook(0, lambda: self.test_with_tta(self.cfg, self.model)))
        # Before the writer, which the main process has last: it closes its files at the end of training.
        place = len(found) - 1 if comm.is_main_process() else len(found)
        return found[:place] + added + found[place:]

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Build and log the model.

        Args:
            cfg: the config.

        Raises:
            ConfigError: a part of it is not registered, or a non-local block has no place.
        """
        try:
            return super().build_model(cfg)
        except KeyError as error:
            found = re.match(r"No object named '(.*)' found in '(.*)' registry", str(error.args[0]))
            if found is None:
                raise
            raise ConfigError(
                f"{found[1]!r} is not registered in {found[2]}: correct the config key that names it, or "
                "import the code that registers it"
            ) from error

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
        return COCOEvaluator(
            dataset_name, _tasks(cfg), output_dir=folder, kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS
        )

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


class _BestKeeper(NonLocalCheckpointer):
    """Saves the best checkpoint without making it the one to resume from."""

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
    task = next(task for task in ("segm", "keypoints", "bbox") if task in _tasks(cfg))
    # With one data set, Detectron2 leaves its name out of the metrics.
    prefix = f"{cfg.DATASETS.TEST[0]}/" if len(cfg.DATASETS.TEST) > 1 else ""
    return f"{prefix}{task}/AP"
