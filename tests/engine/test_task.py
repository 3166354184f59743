from __future__ import annotations

import pytest

pytest.importorskip("detectron2")

from detectron2.config import get_cfg

from nonlocal_det import add_nonlocal_config
from nonlocal_det.detection.task import Detection
from nonlocal_det.engine import task as module
from nonlocal_det.engine.task import all_tasks, find_task, register_task


class Sorting(Detection):
    name = "sorting"
    architectures = frozenset({"Sorter"})

    def add_keys(self, cfg) -> None:
        cfg.SORTING = "quick"


@pytest.fixture
def sorting(monkeypatch):
    """A task that is registered while the test runs."""
    monkeypatch.setattr(module, "_tasks", list(all_tasks()))
    task = Sorting()
    register_task(task)
    return task


def config(architecture: str):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = architecture
    return cfg


def test_a_task_is_found_by_its_architecture(sorting):
    assert find_task(config("Sorter")) is sorting
    assert find_task(config("RetinaNet")).name == "detection"


def test_the_first_task_takes_the_users_own_architectures(sorting):
    assert find_task(config("MyOwnRCNN")) is all_tasks()[0]


def test_a_name_is_registered_once(sorting):
    before = all_tasks()
    register_task(Sorting())
    assert all_tasks() == before
    assert [task.name for task in before] == ["detection", "sorting"]


def test_keys_are_added_once(sorting):
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    assert cfg.SORTING == "quick"
    assert cfg.MODEL.NONLOCAL.RES4 == []
    cfg.MODEL.NONLOCAL.RES4 = [-1]
    cfg.SORTING = "merge"
    expected = cfg.dump()
    add_nonlocal_config(cfg)
    assert cfg.dump() == expected
