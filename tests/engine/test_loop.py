from __future__ import annotations

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.engine import hooks
from detectron2.modeling import build_model

from nonlocal_det import ConfigError, get_config
from nonlocal_det.engine.loop import Trainer

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"

pytestmark = pytest.mark.usefixtures("fresh_logging")


@pytest.fixture
def config(small_options, mini_coco, tmp_path):
    def make(name: str = MASK, **changes):
        keypoints = "keypoints_" if name == KEYPOINT else ""
        options = {
            "MODEL.RESNETS.DEPTH": 50,
            "DATASETS.TRAIN": (f"mini_{keypoints}train",),
            "DATASETS.TEST": (f"mini_{keypoints}val",),
            "OUTPUT_DIR": str(tmp_path / "out"),
            "SOLVER.MAX_ITER": 2,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return get_config(name, small_options(options))

    return make


def best_hook(trainer: Trainer) -> hooks.BestCheckpointer:
    (found,) = (hook for hook in trainer._hooks if isinstance(hook, hooks.BestCheckpointer))
    return found


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "segm/AP"),
        ({"MODEL__MASK_ON": False}, "bbox/AP"),
        ({"DATASETS__TEST": ("mini_val", "mini_train")}, "mini_val/segm/AP"),
    ],
)
def test_metric_of_the_best_checkpoint(config, changes, metric):
    assert best_hook(Trainer(config(**changes)))._val_metric == metric


def test_keypoints_train_and_are_evaluated(config, tmp_path):
    trainer = Trainer(config(KEYPOINT, SOLVER__MAX_ITER=1))
    trainer.resume_or_load(resume=False)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train()
    assert best_hook(trainer)._val_metric == "keypoints/AP"
    latest = trainer.storage.latest()
    assert {"bbox/AP", "keypoints/AP", "total_loss", "loss_keypoint"} <= set(latest)
    name = "roi_heads.keypoint_head.non_local_2.w_z.weight"
    assert not torch.equal(before[name], trainer.model.state_dict()[name])


def test_gradient_clipping(config):
    cfg = config(SOLVER__MAX_ITER=1, SOLVER__WEIGHT_DECAY=0.0, DATASETS__TEST=())
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = True
    cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "value"
    cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 0.0
    trainer = Trainer(cfg)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.named_parameters())


def test_new_block_in_a_frozen_stage(config, tmp_path):
    changes = {"MODEL__NONLOCAL__RES2": [-1], "MODEL__BACKBONE__FREEZE_AT": 2}
    with pytest.raises(ConfigError) as raised:
        Trainer(config(**changes)).resume_or_load(resume=False)
    message = str(raised.value)
    assert message.startswith("MODEL.BACKBONE.FREEZE_AT is 2: it freezes res2")
    assert "backbone.bottom_up.res2.non_local_2" in message
    assert "write MODEL.BACKBONE.FREEZE_AT 1 or less" in message

    # A baseline does not give it weights either; a file that holds the block does.
    def save(**options) -> str:
        path = tmp_path / "w.pth"
        torch.save({"model": build_model(config(**options)).state_dict()}, path)
        return str(path)

    baseline = save(MODEL__BACKBONE__FREEZE_AT=2)
    with pytest.raises(ConfigError, match="FREEZE_AT"):
        Trainer(config(MODEL__WEIGHTS=baseline, **changes)).resume_or_load(resume=False)
    Trainer(config(MODEL__WEIGHTS=save(**changes), **changes)).resume_or_load(resume=False)
    # With the first block of res3 not frozen, nothing is wrong.
    Trainer(config(MODEL__NONLOCAL__RES3=[0], MODEL__BACKBONE__FREEZE_AT=2)).resume_or_load(resume=False)


def test_new_residual_block_in_a_frozen_stage(config):
    changes = {"MODEL__NONLOCAL__RES2": [-1], "MODEL__BACKBONE__FREEZE_AT": 2}
    message = r"FREEZE_AT is 2.*the new residual block .*res2\.residual_2.*FREEZE_AT 1 or less"
    with pytest.raises(ConfigError, match=message):
        Trainer(config(MODEL__NONLOCAL__BLOCK="residual", **changes)).resume_or_load(resume=False)


def test_frozen_norm_without_weights_is_warned_of(config, caplog):
    def warned(**changes) -> bool:
        caplog.clear()
        Trainer(config(**changes)).resume_or_load(resume=False)
        return "deep nets overflow" in caplog.text

    assert not warned()
    assert warned(MODEL__RESNETS__NORM="FrozenBN")


def test_a_part_that_is_not_registered(config):
    for key in ("MODEL__META_ARCHITECTURE", "MODEL__ROI_MASK_HEAD__NAME"):
        with pytest.raises(ConfigError, match="'Nonesuch' is not registered in "):
            Trainer(config(**{key: "Nonesuch"}))


def test_scaled_values_are_logged(config, caplog):
    cfg = config(SOLVER__IMS_PER_BATCH=16, SOLVER__REFERENCE_WORLD_SIZE=8, SOLVER__BASE_LR=0.02)
    with caplog.at_level("INFO"):
        trainer = Trainer(cfg)
    assert "batch_size=2, learning_rate=0.0025, max_iter=16" in caplog.text
    assert trainer.cfg.SOLVER.IMS_PER_BATCH == 2
    assert trainer.max_iter == 16


class Recorder(hooks.HookBase):
    """Notes what is called, and does something after a step."""

    def __init__(self, name: str, calls: list, after_step=lambda trainer: None) -> None:
        self.name, self.calls, self.act = name, calls, after_step

    def after_step(self) -> None:
        self.calls.append((self.name, "step", self.trainer.iter))
        self.act(self.trainer)

    def after_train(self) -> None:
        self.calls.append((self.name, "train", self.trainer.iter))


def train_until(config, after_step) -> tuple[Trainer, list, BaseException | None]:
    """Train with a hook that does something between two that note what is called."""
    calls: list = []
    trainer = Trainer(config(SOLVER__MAX_ITER=3, DATASETS__TEST=()))
    names = ("first", "acts", "last")
    trainer.register_hooks([Recorder(n, calls, *[after_step] * (n == "acts")) for n in names])
    error = None
    try:
        trainer.train()
    except Exception as raised:
        error = raised
    return trainer, calls, error


ALL_ENDS = [("first", "train"), ("acts", "train"), ("last", "train")]


def test_a_hook_ends_training_early(config):
    trainer, calls, error = train_until(config, lambda trainer: trainer.end("enough"))
    assert error is None
    assert (trainer.iter, trainer.failed, trainer.ending.reason) == (1, False, "enough")
    assert calls[:3] == [("first", "step", 0), ("acts", "step", 0), ("last", "step", 0)]
    assert [call[:2] for call in calls[3:]] == ALL_ENDS


def test_a_hook_ends_training_by_an_error(config, caplog):
    wrong = ConfigError("KEY is 1: write 2")
    trainer, calls, error = train_until(config, lambda trainer: trainer.end("wrong", wrong))
    assert error is wrong
    assert trainer.failed
    assert calls[:2] == [("first", "step", 0), ("acts", "step", 0)]
    assert [call[:2] for call in calls[2:]] == ALL_ENDS
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [ConfigError("KEY is 1: write 2"), ZeroDivisionError("a fault")])
def test_what_a_hook_raises_ends_training(config, error, caplog):
    def fail(trainer: Trainer) -> None:
        raise error

    trainer, calls, raised = train_until(config, fail)
    assert raised is error
    assert trainer.failed
    assert calls[:2] == [("first", "step", 0), ("acts", "step", 0)]
    assert [call[:2] for call in calls[2:]] == ALL_ENDS
    assert ("Traceback" in caplog.text) == isinstance(error, ZeroDivisionError)


def test_the_first_error_counts(config):
    def end_twice(trainer: Trainer) -> None:
        trainer.end("first", ConfigError("first"))
        trainer.end("second", ConfigError("second"))

    assert str(train_until(config, end_twice)[2]) == "first"
