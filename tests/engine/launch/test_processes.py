from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.utils import comm

from nonlocal_det import ConfigError
from nonlocal_det.engine.launch.processes import launch_processes

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")


def refuse_in_rank_1(message: str) -> None:
    if comm.get_rank() == 1:
        raise ConfigError(message)
    comm.synchronize()  # waits for a process that has gone


def fail_in_rank_1() -> None:
    if comm.get_rank() == 1:
        threading.Thread(target=time.sleep, args=(10_000,)).start()  # which Python would wait for
        raise ZeroDivisionError("a fault of the program")
    comm.synchronize()


def kill_rank_1() -> None:
    if comm.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
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
def test_a_fault_in_one_process_ends_all_and_its_traceback_comes_first(capfd):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="a fault of the program"):
        launch_processes(fail_in_rank_1, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    tracebacks = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    assert lines[tracebacks[0] - 1] == "Process 1 of 2 failed:"
    end = lines.index("ZeroDivisionError: a fault of the program")
    assert all(number > end for number in tracebacks[1:])


@no_gpu
@pytest.mark.slow
def test_a_process_that_is_killed_ends_all():
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match=r"process 1 .* SIGKILL"):
        launch_processes(kill_rank_1, 2)
