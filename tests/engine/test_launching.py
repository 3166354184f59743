from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.utils import comm

from nonlocal_det import ConfigError
from nonlocal_det.engine import launch_processes

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")


def refuse_in_rank_1(message: str) -> None:
    if comm.get_rank() == 1:
        raise ConfigError(message)
    comm.synchronize()  # waits for a process that has gone


def fail_in_rank_1() -> None:
    if comm.get_rank() == 1:
        raise ZeroDivisionError("a fault of the program")
    comm.synchronize()


def test_one_process_is_this_one():
    seen = []
    launch_processes(seen.append, args=(sys,))
    assert seen == [sys]


@no_gpu
def test_wrong_input_in_another_process_comes_back_as_it_is():
    with pytest.raises(ConfigError, match=r"^KEY is 1: write 2$"):
        launch_processes(refuse_in_rank_1, 2, args=("KEY is 1: write 2",))


@no_gpu
@pytest.mark.slow
def test_a_fault_in_another_process_keeps_its_traceback():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="a fault of the program"):
        launch_processes(fail_in_rank_1, 2)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_gpus": 0}, "--num-gpus 0: must be 1 or more"),
        ({"num_machines": 0}, "--num-machines 0: must be 1 or more"),
        ({"num_machines": 2, "machine_rank": 2}, "--machine-rank 2: must be 0 to 1"),
        ({"machine_rank": -1}, "--machine-rank -1"),
        ({"num_machines": 2}, "--dist-url is missing"),
    ],
)
def test_numbers_that_do_not_fit(numbers, message):
    with pytest.raises(ConfigError, match=message):
        launch_processes(print, **numbers)


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--num-gpus 4: this machine has 1"):
        launch_processes(print, num_gpus=4)
