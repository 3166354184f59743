from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det.engine import Preempted, launch_processes
from nonlocal_det.engine.preemption import STOP_SIGNALS, StopRequest, stop_request


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request(number):
    request, before = StopRequest(), signal.getsignal(number)
    with request.listening():
        assert not request
        os.kill(os.getpid(), number)
        assert request
    assert signal.getsignal(number) == before
    with request.listening():
        assert not request


@pytest.mark.parametrize(("first", "second"), [STOP_SIGNALS, STOP_SIGNALS[::-1], STOP_SIGNALS[:1] * 2])
def test_the_second_signal_ends_the_process(first, second, tmp_path):
    child = os.fork()
    if child == 0:
        with StopRequest().listening(leave=lambda: (tmp_path / "left").touch()):
            os.kill(os.getpid(), first)
            (tmp_path / "went_on").touch()
            os.kill(os.getpid(), second)
            time.sleep(60)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == second
    assert (tmp_path / "went_on").exists()
    assert (tmp_path / "left").exists()


def test_other_threads_cannot_listen():
    seen = []

    def listen() -> None:
        with StopRequest().listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def wait_until_stopped(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    until = time.monotonic() + 100
    while not stop_request():
        assert time.monotonic() < until
        time.sleep(0.05)
    raise Preempted("stopped")


def signal_when(ready) -> threading.Thread:
    """Send this process SIGTERM once ``ready()`` is true."""

    def wait() -> None:
        until = time.monotonic() + 100
        while not ready() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_a_signal_to_the_parent_counts_in_its_processes(tmp_path, monkeypatch):
    request = StopRequest()
    monkeypatch.setattr("nonlocal_det.engine.preemption._request", request)
    thread = signal_when(lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(Preempted):
        launch_processes(wait_until_stopped, 2, args=(tmp_path,))
    thread.join()
    assert request
