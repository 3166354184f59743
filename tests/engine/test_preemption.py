from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.evaluation import DatasetEvaluator
from detectron2.utils.env import seed_all_rng

from nonlocal_det import get_config
from nonlocal_det.detection.task import Detection
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.loop import Trainer
from nonlocal_det.engine.preemption import STOP_SIGNALS, StopRequest
from nonlocal_det.errors import Preempted

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"


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


def test_a_signal_that_is_sent_twice_counts_once():
    request = StopRequest()
    request.echo = 60
    with request.listening():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert request


def test_other_threads_cannot_listen():
    seen = []

    def listen() -> None:
        with StopRequest().listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def wait_until_stopped(folder: Path, stop: StopRequest) -> None:
    (folder / str(os.getpid())).touch()
    until = time.monotonic() + 100
    while not stop:
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
def test_a_signal_to_the_parent_counts_in_its_processes(tmp_path):
    request = StopRequest()
    thread = signal_when(lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(Preempted):
        launch_processes(wait_until_stopped, 2, args=(tmp_path, request), stop=request)
    thread.join()
    assert request


class Interrupted(Detection):
    """Its evaluations note their images; a signal arrives at the second one of the evaluation named."""

    signal_in: int | None = None  # counted from 1
    seen: list[list[int]]

    def build_evaluator(self, cfg, dataset, folder):
        cls = Interrupted

        class Evaluator(DatasetEvaluator):
            def reset(self):
                cls.seen.append([])

            def process(self, inputs, outputs):
                cls.seen[-1] += [image["image_id"] for image in inputs]
                if (len(cls.seen), len(cls.seen[-1])) == (cls.signal_in, 2):
                    os.kill(os.getpid(), signal.SIGUSR1)

            def evaluate(self):
                return {"segm": {"AP": 1.0}}

        return Evaluator()


@pytest.fixture
def run(small_options, mini_coco, tmp_path):
    """A function: train for 4 iterations, evaluate after each second one; return the images evaluated."""

    def call(name: str, signal_in: int | None = None, **changes) -> list[list[int]]:
        options = {
            "DATASETS.TRAIN": ("mini_train",),
            "DATASETS.TEST": ("mini_val",),
            "SOLVER.MAX_ITER": 4,
            "SOLVER.CHECKPOINT_PERIOD": 3,
            "TEST.EVAL_PERIOD": 2,
            "SEED": 1,
            "OUTPUT_DIR": str(tmp_path / name),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        Interrupted.signal_in, Interrupted.seen = signal_in, []
        seed_all_rng(1)
        trainer = Trainer(get_config(MASK, small_options(options)), task=Interrupted())
        trainer.resume_or_load(resume=True)
        trainer.train()
        return Interrupted.seen

    return call


@pytest.mark.usefixtures("fresh_logging")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_during_an_evaluation(run, tmp_path, workers):
    first, last = run("straight")
    assert len(first) == len(last) == 5
    expected = torch.load(tmp_path / "straight" / "model_final.pth", weights_only=True)

    # Its iteration has not been saved by the period, so that is done now.
    with pytest.raises(Preempted, match=r"in the evaluation after 2 of 4 iterations, .* --resume"):
        run("stopped", signal_in=1, DATALOADER__NUM_WORKERS=workers)
    assert Interrupted.seen == [first[:2]]
    assert (tmp_path / "stopped" / "last_checkpoint").read_text() == "model_0000001.pth"
    # The evaluation is made up for; a signal in the last one leaves that to another call.
    with pytest.raises(Preempted, match="during an evaluation"):
        run("stopped", signal_in=2, DATALOADER__NUM_WORKERS=workers)
    assert Interrupted.seen == [first, last[:2]]
    assert run("stopped") == [last]
    found = torch.load(tmp_path / "stopped" / "model_final.pth", weights_only=True)
    assert all(torch.equal(value, found["model"][name]) for name, value in expected["model"].items())
    assert torch.equal(
        found["trainer"]["random_states"][0]["torch"], expected["trainer"]["random_states"][0]["torch"]
    )
