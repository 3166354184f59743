"""Runs that end before their last iteration, as their score gets no better; and curves of all evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.engine import HookBase
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling.meta_arch import retinanet
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import get_event_storage
from fvcore.nn import sigmoid_focal_loss

from nonlocal_det import get_config
from nonlocal_det.detection.task import Detection
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.loop import Trainer
from nonlocal_det.errors import CheckpointError

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x_nl.yaml"

pytestmark = pytest.mark.usefixtures("fresh_logging")


class Crash(Exception):  # noqa: N818
    pass


class CrashAt(HookBase):
    def __init__(self, iteration: int | None) -> None:
        self.iteration = iteration

    def before_step(self) -> None:
        if self.trainer.iter == self.iteration:
            raise Crash


class Scored(Detection):
    """Scores are read from OUTPUT_DIR/scores, by iteration; that of each evaluation is noted there."""

    def build_evaluator(self, cfg, dataset, folder):
        folder = Path(cfg.OUTPUT_DIR)

        class Evaluator(DatasetEvaluator):
            def evaluate(self):
                iteration = get_event_storage().iter
                if comm.is_main_process():
                    with open(folder / "evaluated", "a") as file:
                        file.write(f"{iteration} ")
                    score = json.loads((folder / "scores").read_text()).get(str(iteration), 0)
                    return {"segm": {"AP": score}} if score is not None else {}
                return {}

        return Evaluator()


@pytest.fixture
def config(small_options, mini_coco):
    """A function: the config of a run that is evaluated every two iterations, with the scores given."""

    def make(folder: Path, scores=(), patience: int = 2, model: str = MASK, **changes):
        folder.mkdir(exist_ok=True)
        if scores:
            text = json.dumps({str(2 * i + 1): score for i, score in enumerate(scores)})
            (folder / "scores").write_text(text)
        options = {
            "DATASETS.TRAIN": ("mini_train",),
            "DATASETS.TEST": ("mini_val",),
            "SOLVER.MAX_ITER": 14,
            "SOLVER.CHECKPOINT_PERIOD": 4,
            "SOLVER.EARLY_STOP_PATIENCE": patience,
            "TEST.EVAL_PERIOD": 2,
            "SEED": 1,
            "OUTPUT_DIR": str(folder),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return get_config(model, small_options(options))

    return make


def train(cfg, crash: int | None = None, trainer: type[Trainer] = Trainer) -> Trainer:
    seed_all_rng(cfg.SEED)
    trainer = trainer(cfg, task=Scored())
    trainer.register_hooks([CrashAt(crash)])
    trainer.resume_or_load(resume=True)
    trainer.train()
    return trainer


def saved(folder: Path, name: str = "model_final.pth") -> dict:
    return torch.load(folder / name, weights_only=True)


def evaluated(folder: Path) -> list[int]:
    return [int(number) for number in (folder / "evaluated").read_text().split()]


def reasons(caplog) -> list[str]:
    found = [r.getMessage() for r in caplog.records if "stopped early" in r.getMessage()]
    caplog.clear()
    return found


def assert_same(a: dict, b: dict) -> None:
    for key in ("iteration", "scheduler"):
        assert a.get(key) == b.get(key)
    for name, value in a["model"].items():
        assert torch.equal(value, b["model"][name]), name
    states, others = (x["trainer"]["random_states"] for x in (a, b))
    assert torch.equal(states[0]["torch"], others[0]["torch"])
    assert a["trainer"]["hooks"] == b["trainer"]["hooks"]
    assert a["trainer"]["data"] == b["trainer"]["data"]


#: The best is the second; the third equals it; the fifth is the third in turn that is not better.
SCORES = (10.0, 20.0, 20.0, 15.0, 19.0, 30.0)


@pytest.mark.parametrize(
    ("scores", "patience", "last"),
    [
        (SCORES, 2, 8),
        (SCORES, 4, 14),  # the sixth is the best
        ((math.nan, 5.0, math.nan, 4.0, 3.0), 2, 10),  # NaN is no score
        ((10.0, 5.0, 11.0, 5.0, 5.0), 2, 10),
    ],
)
def test_it_stops_when_the_best_is_old(config, tmp_path, caplog, scores, patience, last):
    caplog.set_level("INFO")
    trainer = train(config(tmp_path, scores, patience))
    # The last iteration of a whole run is evaluated after it.
    assert evaluated(tmp_path) == [*range(1, 13, 2), 14][: last // 2]
    final = saved(tmp_path)
    assert final["iteration"] == last - 1
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert trainer.iter == trainer.max_iter == last
    found = reasons(caplog)
    if last == 14:
        assert not found
        return
    assert len(found) == 1
    assert "\n" not in found[0]
    assert f"after {last} of 14 iterations" in found[0]
    assert f"EARLY_STOP_PATIENCE is {patience}" in found[0]
    best = max(score for score in scores[: last // 2] if math.isfinite(score))
    assert f"segm/AP, {best:.2f} after {2 * scores.index(best) + 2}," in found[0]
    assert saved(tmp_path, "model_best.pth")["iteration"] == 2 * scores.index(best) + 1
    # All evaluations are on record, although they come more often than the log's lines.
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    noted = {line["iteration"]: line["segm/AP"] for line in lines if "segm/AP" in line}
    assert [noted[2 * i + 1] for i in range(last // 2)] == pytest.approx(scores[: last // 2], nan_ok=True)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_run_that_has_stopped_stays_so_until_the_setting_is_changed(config, tmp_path, caplog):
    caplog.set_level("INFO")
    train(config(tmp_path / "a", SCORES, patience=2))
    before = (tmp_path / "a" / "model_final.pth").stat().st_mtime_ns
    (first,) = reasons(caplog)
    for changes in ({}, {"SOLVER__MAX_ITER": 20}):
        train(config(tmp_path / "a", **changes))
        assert reasons(caplog) == [first.replace("of 14", f"of {changes.get('SOLVER__MAX_ITER', 14)}")]
    assert (tmp_path / "a" / "model_final.pth").stat().st_mtime_ns == before
    assert evaluated(tmp_path / "a") == [1, 3, 5, 7]

    # With more patience it goes on as if it had never been stopped.
    train(config(tmp_path / "a", patience=3))
    assert "after 10 of 14" in reasons(caplog)[0]
    assert evaluated(tmp_path / "a") == [1, 3, 5, 7, 9]
    train(config(tmp_path / "b", SCORES, patience=3))
    assert_same(saved(tmp_path / "a"), saved(tmp_path / "b"))
    train(config(tmp_path / "a", patience=0))
    assert saved(tmp_path / "a")["iteration"] == 13
    assert evaluated(tmp_path / "a") == [1, 3, 5, 7, 9, 11, 14]


def test_crashes_before_change_nothing(config, tmp_path):
    """What it waits for is counted on, and an evaluation that is made up for is counted once."""
    train(config(tmp_path / "straight", SCORES))
    cfg = config(tmp_path / "crashed", SCORES)
    for iteration in (4, 5, 7):
        with pytest.raises(Crash):
            train(cfg, iteration)
    train(cfg)
    assert_same(saved(tmp_path / "crashed"), saved(tmp_path / "straight"))


class CrashInEvaluation(Trainer):
    """Crashes after it has evaluated, and before anything follows from that."""

    iteration = 7

    def evaluate(self):
        found = super().evaluate()
        if self.storage.iter == self.iteration:
            raise Crash
        return found


def test_a_crash_between_the_deciding_evaluation_and_the_end(config, tmp_path, caplog):
    caplog.set_level("INFO")
    train(config(tmp_path / "straight", SCORES))
    cfg = config(tmp_path / "crashed", SCORES)
    with pytest.raises(Crash):
        train(cfg, trainer=CrashInEvaluation)
    assert (tmp_path / "crashed" / "last_checkpoint").read_text() == "model_0000007.pth"
    reasons(caplog)
    # It decides before it trains on, and the checkpoint is that of a run which was never stopped.
    trainer = train(cfg)
    assert len(reasons(caplog)) == 1
    assert trainer.iter == trainer.max_iter == 8
    assert evaluated(tmp_path / "crashed") == [1, 3, 5, 7, 7]
    assert_same(saved(tmp_path / "crashed"), saved(tmp_path / "straight"))
    train(cfg)
    assert len(reasons(caplog)) == 1
    assert evaluated(tmp_path / "crashed") == [1, 3, 5, 7, 7]


def test_less_patience_stops_a_run_that_is_resumed(config, tmp_path, caplog):
    caplog.set_level("INFO")
    with pytest.raises(Crash):
        train(config(tmp_path, (10.0, 9.0, 8.0, 7.0, 6.0), patience=5), 8)
    train(config(tmp_path, patience=2))
    assert "after 8 of 14" in reasons(caplog)[0]
    assert saved(tmp_path)["iteration"] == 7


def test_a_full_disk_at_the_end_is_an_error(config, tmp_path, monkeypatch, caplog):
    def full(self, name, **kwargs):
        if name == "model_final":
            raise CheckpointError("no space")

    monkeypatch.setattr("nonlocal_det.checkpoint.checkpointer.NonLocalCheckpointer.save", full)
    with pytest.raises(CheckpointError, match="no space"):
        train(config(tmp_path, SCORES))
    assert "Traceback" not in caplog.text
    assert not (tmp_path / "curves.png").exists()


def test_without_a_score_it_trains_on_and_says_so_once(config, tmp_path, caplog):
    train(config(tmp_path, [None] * 9, patience=1, SOLVER__MAX_ITER=6))
    assert caplog.text.count("no effect so far, as there is no segm/AP") == 1
    assert saved(tmp_path)["iteration"] == 5


def run_in_processes(options: list) -> None:
    for _ in range(2):  # the second time it is stopped already
        trainer = train(get_config(MASK, options))
        assert trainer.iter == trainer.max_iter == 8
        assert trainer.ending.reason.startswith("Training was stopped early after 8 of 14")


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_all_processes_stop(config, small_options, mini_coco, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(mini_coco))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cfg = config(tmp_path, SCORES, DATASETS__TRAIN=("coco_2017_train",), DATASETS__TEST=("coco_2017_val",))
    options = small_options({
        "DATASETS.TRAIN": cfg.DATASETS.TRAIN,
        "DATASETS.TEST": cfg.DATASETS.TEST,
        "SOLVER.MAX_ITER": 14,
        "SOLVER.EARLY_STOP_PATIENCE": 2,
        "TEST.EVAL_PERIOD": 2,
        "TEST.VAL_LOSS": True,
        "SEED": 1,
        "OUTPUT_DIR": str(tmp_path),
    })  # fmt: skip
    launch_processes(run_in_processes, 2, args=(options,))
    assert evaluated(tmp_path) == [1, 3, 5, 7]
    final = saved(tmp_path)
    assert final["iteration"] == 7
    assert len(final["trainer"]["random_states"]) == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert sum("val/total_loss" in line for line in lines) == 4
    # Two processes share the batch of two, so three iterations are an epoch of six images.
    assert {line["iteration"]: line["epoch"] for line in lines if "epoch" in line}[7] == pytest.approx(8 / 3)


@pytest.mark.parametrize("model", [MASK, RETINANET])
def test_the_validation_loss_changes_no_run_and_is_resumed_exactly(config, tmp_path, model, monkeypatch):
    # TorchScript rounds otherwise in its first calls than in later ones.
    monkeypatch.setattr(retinanet, "sigmoid_focal_loss_jit", sigmoid_focal_loss)

    def run(name: str, crash: int | None = None, **changes) -> dict:
        cfg = config(tmp_path / name, SCORES, 0, model=model, SOLVER__MAX_ITER=7, **changes)
        if crash is not None:
            with pytest.raises(Crash):
                train(cfg, crash)
        train(cfg)
        return saved(tmp_path / name)

    plain = run("plain")
    assert_same(run("straight", TEST__VAL_LOSS=True), plain)
    assert_same(run("crashed", 5, TEST__VAL_LOSS=True), plain)

    def curve(name: str) -> dict[int, dict[str, float]]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]
        return {
            line["iteration"]: {key: value for key, value in line.items() if key.startswith("val/")}
            for line in lines
            if "val/total_loss" in line
        }

    assert curve("straight").keys() == {1, 3, 5, 7}
    assert curve("crashed") == curve("straight")
    assert not curve("plain")
    values = curve("straight")[3]
    assert values["val/total_loss"] == pytest.approx(sum(values.values()) - values["val/total_loss"])
    assert ("val/loss_mask" if model == MASK else "val/loss_cls") in values


def test_names_and_log_lines(config, tmp_path, caplog):
    caplog.set_level("INFO")
    cfg = config(
        tmp_path,
        SCORES,
        0,
        SOLVER__MAX_ITER=2,
        TEST__EVAL_PERIOD=0,
        TEST__VAL_LOSS=True,
        DATASETS__TEST=("mini_val", "mini_train"),
    )
    train(cfg)
    (line,) = (json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()[-1:])
    assert {"mini_val/val/total_loss", "mini_train/val/loss_cls", "mini_val/segm/AP"} <= line.keys()
    lines = [record.getMessage() for record in caplog.records]
    (training,) = (line for line in lines if " iter: " in line)
    # Six images, all of which can be trained on, by two in a batch.
    assert "epoch: 0.67  iter: 1  total_loss: " in training
    assert "val/" not in training
    assert sum("mini_train/val/total_loss: " in line for line in lines) == 1
