"""A run that was stopped and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.data import DatasetCatalog
from detectron2.engine import HookBase
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import get_event_storage

from nonlocal_det import ConfigError, get_config
from nonlocal_det.detection.task import Detection
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.loop import Trainer
from nonlocal_det.errors import CheckpointError, Preempted

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
ITERATIONS = 7

pytestmark = pytest.mark.usefixtures("fresh_logging")


class Crash(Exception):  # noqa: N818
    pass


class CrashAt(HookBase):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self) -> None:
        if self.trainer.iter == self.iteration:
            raise Crash


def train(cfg, stop: HookBase | None = None, task: Detection | None = None) -> Trainer:
    """Do what one call of a program with --resume does."""
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + comm.get_rank())
    trainer = Trainer(cfg, task=task)
    trainer.register_hooks([stop])
    trainer.resume_or_load(resume=True)
    trainer.train()
    return trainer


def train_with_crashes(cfg, *iterations: int, task: Detection | None = None) -> Trainer:
    for iteration in iterations:
        with pytest.raises(Crash):
            train(cfg, CrashAt(iteration), task)
    return train(cfg, task=task)


def saved(folder: Path, name: str = "model_final.pth") -> dict:
    return torch.load(Path(folder) / name, weights_only=True)


def assert_same(a, b, where: str = "") -> None:
    """Check that nested containers of tensors are the same, bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{number}]")
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def options(small_options, mini_coco):
    """A function: the overrides of a short run, for this process or, with ``builtin``, for any other."""

    def make(output: Path, builtin: bool = False, **changes) -> list:
        options = {
            "DATASETS.TRAIN": ("coco_2017_train" if builtin else "mini_train",),
            "DATASETS.TEST": (),
            "SOLVER.MAX_ITER": ITERATIONS,
            "SOLVER.CHECKPOINT_PERIOD": 2,
            "SOLVER.STEPS": (4,),
            "SEED": 1,
            "OUTPUT_DIR": str(output),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return small_options(options)

    return make


@pytest.fixture(scope="module")
def config(options):
    return lambda *args, **changes: get_config(MASK, options(*args, **changes))


@pytest.fixture
def other_processes(mini_coco, monkeypatch):
    """Prepare for processes that have not registered mini_train, and share the machine."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(mini_coco))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """A run that was never stopped: what it saved last."""
    folder = tmp_path_factory.mktemp("straight")
    train(config(folder))
    return saved(folder)


def test_it_trains_at_all(straight, config, tmp_path):
    train(config(tmp_path, SOLVER__MAX_ITER=1))
    first = saved(tmp_path)["model"]
    moved = [name for name, value in straight["model"].items() if not torch.equal(value, first[name])]
    assert any(name.endswith("res4.non_local_5.w_z.weight") for name in moved)
    train(config(tmp_path / "other", SEED=2))
    other = saved(tmp_path / "other")["model"]
    assert not torch.equal(other["backbone.fpn_lateral5.weight"], first["backbone.fpn_lateral5.weight"])


@pytest.mark.parametrize("workers", [0, 2])
def test_crashes_change_nothing(straight, config, tmp_path, workers):
    # Every iteration between two checkpoints, one before the first, and one in the last step.
    train_with_crashes(config(tmp_path, DATALOADER__NUM_WORKERS=workers), 1, 3, 4, 6)
    # All of it: weights, optimizer, scheduler, position in the data, random states.
    assert_same(saved(tmp_path), straight)


class Scored(Detection):
    """Its scores follow from the iteration alone; the best is the first."""

    def build_evaluator(self, cfg, dataset, folder):
        class Evaluator(DatasetEvaluator):
            def evaluate(self):
                torch.rand(3), np.random.rand()
                iteration = get_event_storage().iter
                with open(Path(cfg.OUTPUT_DIR) / "evaluated", "a") as file:
                    file.write(f"{iteration} ")
                return {"segm": {"AP": 50.0 - iteration}}

        return Evaluator()


def test_evaluation_changes_nothing_and_the_best_is_remembered(straight, config, tmp_path):
    cfg = config(tmp_path, DATASETS__TEST=("mini_val",), TEST__EVAL_PERIOD=2)
    train_with_crashes(cfg, 2, 4, 5, task=Scored())
    # Those that the saved iterations 1 and 3 still owed are made up for.
    assert (tmp_path / "evaluated").read_text().split() == ["1", "1", "3", "3", "3", "5", str(ITERATIONS)]
    assert_same(saved(tmp_path)["model"], straight["model"])
    assert saved(tmp_path, "model_best.pth")["iteration"] == 1


def test_a_drawn_seed_and_precise_batch_norms(config, tmp_path):
    """SEED -1 gives each call other random numbers until it takes up those of the checkpoint."""
    cfg = config(tmp_path, SEED=-1, TEST__PRECISE_BN__ENABLED=True, TEST__EVAL_PERIOD=3)
    cfg.TEST.PRECISE_BN.NUM_ITER = 2
    train_with_crashes(cfg, 2)
    expected = saved(tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    train(cfg)
    assert_same(saved(tmp_path), expected)


class SignalAt(HookBase):
    def __init__(self, iteration: int, number: int = signal.SIGTERM, ranks: list[int] | None = None) -> None:
        self.iteration, self.number, self.ranks = iteration, number, ranks

    def before_step(self) -> None:
        if self.trainer.iter == self.iteration and (self.ranks is None or comm.get_rank() in self.ranks):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("workers", [0, 1])
def test_signals_stop_after_the_iteration_and_change_nothing(straight, config, tmp_path, workers):
    cfg = config(tmp_path, DATALOADER__NUM_WORKERS=workers)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    for iteration, number in ((0, signal.SIGUSR1), (1, signal.SIGTERM), (4, signal.SIGTERM)):
        with pytest.raises(Preempted, match=rf"after {iteration + 1} of 7 .*model_000000{iteration}\.pth"):
            train(cfg, SignalAt(iteration, number))
        assert (tmp_path / "last_checkpoint").read_text() == f"model_000000{iteration}.pth"
        assert not multiprocessing.active_children()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    train(cfg)
    assert_same(saved(tmp_path), straight)


def test_a_signal_in_the_last_iteration_leaves_the_evaluation_to_the_next_call(config, tmp_path):
    cfg = config(tmp_path, DATASETS__TEST=("mini_val",), SOLVER__MAX_ITER=2)
    with pytest.raises(Preempted, match=r"model_final\.pth"):
        train(cfg, SignalAt(1), Scored())
    assert not (tmp_path / "evaluated").exists()
    assert not (tmp_path / "model_best.pth").exists()
    train(cfg, task=Scored())
    assert (tmp_path / "evaluated").read_text() == "2 "
    assert (tmp_path / "model_best.pth").exists()


def train_until_killed(options: list, iteration: int) -> None:
    train(get_config(MASK, options), SignalAt(iteration, signal.SIGKILL))


@pytest.mark.usefixtures("other_processes")
def test_a_kill_changes_nothing(straight, config, options, tmp_path, monkeypatch):
    # Sums of floats depend on the number of threads, so it must be the same before and after.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    args = (options(tmp_path, builtin=True, DATALOADER__NUM_WORKERS=1), 5)
    process = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=args)
    process.start()
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000003.pth"
    train(config(tmp_path))
    assert_same(saved(tmp_path), straight)


class Started(HookBase):
    def __init__(self, file: Path) -> None:
        self.file = file

    def before_step(self) -> None:
        self.file.touch()


def slowed(real):
    def call(*args):
        time.sleep(0.02)
        return real(*args)

    return call


def fork(cfg, started: Path) -> int:
    """Train in a copy of this process; return its number."""
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)  # threads do not survive a fork
        for name in ("fsync", "replace"):  # a slow disk, so that many kills meet a save
            setattr(os, name, slowed(getattr(os, name)))
        train(cfg, Started(started))
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(happened: Callable[[], bool], child: int) -> None:
    while not happened() and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)


def newest(folder: Path) -> str:
    file = folder / "last_checkpoint"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_at_random_moments_change_nothing(config, tmp_path, kills):
    changes = {"SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__MAX_ITER": 6 * kills, "TEST__EVAL_PERIOD": 0}
    straight = fork(config(tmp_path / "straight", **changes), tmp_path / "straight_started")
    rng = random.Random(kills)
    folder, started, killed, saving = tmp_path / "killed", tmp_path / "started", 0, 0
    cfg = config(folder, **changes)
    while True:
        started.unlink(missing_ok=True)
        child = fork(cfg, started)
        wait_for(started.exists, child)
        if killed < kills:
            # One checkpoint more, so that the run gets on. Every other kill then meets a half-written file.
            before = newest(folder)
            wait_for(lambda before=before: newest(folder) != before, child)
            if killed % 2:
                wait_for(lambda: any(folder.glob("*.partial")), child)
                time.sleep(rng.uniform(0, 0.01))
            else:
                time.sleep(rng.uniform(0, 0.2))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert status == signal.SIGKILL
        killed += 1
        saving += any(folder.glob("*.partial"))
    assert os.waitpid(straight, 0)[1] == 0
    print(f"killed {killed} times, {saving} of them while a file was written")
    assert killed > kills / 2
    assert saving >= kills // 4
    assert_same(saved(folder), saved(tmp_path / "straight"))
    assert saved(folder)["iteration"] == 6 * kills - 1


class FullDiskAt(CrashAt):
    def before_step(self) -> None:
        if self.trainer.iter == self.iteration:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))


def test_a_full_disk_stops_the_run_with_its_last_checkpoint(straight, config, tmp_path, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(CheckpointError, match=r"model_0000005\.pth cannot be written") as raised:
            train(config(tmp_path), FullDiskAt(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    assert "Traceback" not in caplog.text
    assert sorted(path.name for path in tmp_path.glob("*.pth*")) == ["model_0000001.pth", "model_0000003.pth"]
    train(config(tmp_path))
    assert_same(saved(tmp_path), straight)


def train_twice(options: list, folder: str) -> None:
    cfg = get_config(MASK, [*options, "OUTPUT_DIR", f"{folder}/straight"])
    train(cfg)
    cfg = get_config(MASK, [*options, "OUTPUT_DIR", f"{folder}/stopped", "DATALOADER.NUM_WORKERS", 1])
    with pytest.raises(Preempted, match="after 3 of 7 iterations"):
        train(cfg, SignalAt(2, ranks=[1]))  # all stop although one was asked to
    train_with_crashes(cfg, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
@pytest.mark.usefixtures("other_processes")
@pytest.mark.timeout(900)  # half a minute of work for six processes
def test_crashes_of_two_processes_change_nothing(config, options, tmp_path, caplog):
    launch_processes(train_twice, 2, args=(options(tmp_path, builtin=True), str(tmp_path)))
    straight = saved(tmp_path / "straight")
    assert_same(saved(tmp_path / "stopped"), straight)
    first, second = straight["trainer"]["random_states"]
    assert not torch.equal(first["torch"], second["torch"])

    # One process goes on in their place, from the same image.
    (tmp_path / "straight" / "last_checkpoint").write_text("model_0000003.pth")
    before = saved(tmp_path / "straight", "model_0000003.pth")["trainer"]["data"]
    trainer = train(config(tmp_path / "straight", SOLVER__MAX_ITER=5))
    assert "1 processes x 2 images instead of 2 x 1: goes on from image" in caplog.text
    assert "random states for 2 processes" in caplog.text
    after = trainer.data_loader.state_dict()
    used = after["position"] - len(after["waiting"]) - before["position"] + len(before["waiting"])
    assert used == 2


def test_a_checkpoint_of_detectron2s_trainer_is_gone_on_from(config, tmp_path, caplog):
    train(config(tmp_path, SOLVER__MAX_ITER=2))
    content = saved(tmp_path)
    for key in ("data", "random_states"):
        del content["trainer"][key]
    torch.save(content, tmp_path / "model_final.pth")
    (tmp_path / "checkpoints.json").unlink()
    trainer = train(config(tmp_path, SOLVER__MAX_ITER=3))
    assert "random states for 0 processes" in caplog.text
    assert trainer.data_loader.state_dict()["position"] >= 6


def test_two_hooks_of_one_class_keep_their_states(config, tmp_path):
    class Counting(HookBase):
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict:
            return {"count": self.count}

        def load_state_dict(self, state: dict) -> None:
            self.count = state["count"]

    def make() -> tuple[Trainer, list[Counting]]:
        trainer, counting = Trainer(config(tmp_path)), [Counting(), Counting()]
        trainer.register_hooks(counting)
        return trainer, counting

    trainer, counting = make()
    counting[0].count, counting[1].count = 3, 5
    other, others = make()
    other.state.load_state_dict(trainer.state.state_dict())
    assert [hook.count for hook in others] == [3, 5]


def test_images_without_a_size_are_wrong_input(config, tmp_path):
    DatasetCatalog.register("no_size", lambda: [{"file_name": "a.jpg", "image_id": 1}])
    try:
        with pytest.raises(ConfigError, match=r"ASPECT_RATIO_GROUPING is True: .*'no_size'.*without 'width'"):
            Trainer(config(tmp_path, DATASETS__TRAIN=("no_size",)))
    finally:
        DatasetCatalog.remove("no_size")
