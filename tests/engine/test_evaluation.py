from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.config import get_cfg
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.utils.data import DataLoader

from nonlocal_det.engine.evaluation import evaluate, evaluate_augmented, metric_prefix
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.errors import Preempted


class Sum(DatasetEvaluator):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def reset(self) -> None:
        self.values: list[float] = []

    def process(self, inputs, outputs) -> None:
        self.values += outputs

    def evaluate(self) -> dict:
        return {"bbox": {"AP": sum(self.values), "the-folder": self.folder}}  # "-": not logged as a number


class Numbers:
    """A task whose data sets are "a", of three numbers, and "b", of two."""

    def build_test_loader(self, cfg, dataset: str) -> DataLoader:
        return DataLoader({"a": [1, 2, 3], "b": [10, 20]}[dataset], collate_fn=list)

    def build_evaluator(self, cfg, dataset: str, folder: str) -> Sum:
        return Sum(os.path.relpath(folder, cfg.OUTPUT_DIR))

    def augment(self, cfg, model: nn.Module) -> nn.Module:
        return Model(factor=100)


class Model(nn.Module):
    """Multiplies, draws random numbers, and has seen in which mode it was."""

    def __init__(self, factor: int = 1, fail: BaseException | None = None, signal_at: int = 0) -> None:
        super().__init__()
        self.factor, self.fail, self.signal_at = factor, fail, signal_at
        self.modes: list[bool] = []

    def forward(self, batch: list) -> list:
        self.modes.append(self.training)
        random.random(), np.random.rand(), torch.rand(1)
        if self.fail:
            raise self.fail
        if len(self.modes) == self.signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return [self.factor * number for number in batch]


@pytest.fixture
def config(tmp_path: Path):
    def make(*datasets: str):
        cfg = get_cfg()
        cfg.OUTPUT_DIR, cfg.DATASETS.TEST = str(tmp_path), datasets
        return cfg

    return make


def draw() -> tuple:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_one_data_set(config):
    model = Model()
    results = evaluate(config("a"), model, task=Numbers())
    assert results == {"bbox": {"AP": 6, "the-folder": "inference"}}
    assert model.modes == [False] * 3


def test_several_data_sets_have_folders_of_their_own(config):
    results = evaluate(config("a", "b"), Model(), task=Numbers())
    assert list(results) == ["a", "b"]
    assert results["b"] == {"bbox": {"AP": 30, "the-folder": "inference/b"}}


@pytest.mark.parametrize("fail", [None, ZeroDivisionError("no")])
@pytest.mark.parametrize("training", [True, False])
def test_random_states_and_mode_are_left_as_they_were(config, fail, training):
    seeds = random.seed, np.random.seed, torch.manual_seed
    [seed(5) for seed in seeds]
    expected = draw()
    [seed(5) for seed in seeds]
    model = Model(fail=fail).train(training)
    if fail:
        with pytest.raises(ZeroDivisionError):
            evaluate(config("a"), model, task=Numbers())
    else:
        evaluate(config("a"), model, task=Numbers())
    assert draw() == expected
    assert model.training is training


def test_a_signal_cuts_it_short(config):
    model, stop = Model(signal_at=2), StopRequest()
    with stop.listening(), pytest.raises(Preempted, match="during an evaluation"):
        evaluate(config("a", "b"), model.train(), task=Numbers(), stop=stop)
    assert len(model.modes) == 2
    assert model.training


def test_augmented(config):
    results = evaluate_augmented(config("a"), Model(), task=Numbers())
    assert results == {"bbox_TTA": {"AP": 600, "the-folder": "inference_TTA"}}


def test_metrics_are_named_by_data_set_where_there_are_several(config):
    assert metric_prefix(config("a"), "a") == ""
    assert metric_prefix(config("a", "b"), "a") == "a/"
