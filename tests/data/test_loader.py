from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.structures import Boxes, Instances
from torch.utils.data import DataLoader

from nonlocal_det.data.loader import BadImage, TrainLoader
from nonlocal_det.data.order import EpochOrder
from nonlocal_det.data.workers import iterate
from nonlocal_det.detection.loaders import check_sample
from nonlocal_det.errors import BadDataError

DATA = [
    {"file_name": f"/data/{i}.jpg", "image_id": i, "width": 4 + i % 3, "height": 5, "annotations": []}
    for i in range(11)
]


def draw(image: dict) -> tuple:
    """A mapper that draws from every generator."""
    return image["image_id"], random.random(), np.random.rand(), torch.rand(1).item()


def make(data: list = DATA, mapper=draw, **changes) -> TrainLoader:
    groups = [int(x["width"] > x["height"]) for x in data]
    options = {"seed": 3, "batch_size": 2, "groups": groups, **changes}
    return TrainLoader(data, mapper, EpochOrder(len(data)), **options)


def take(loader: TrainLoader, count: int) -> list:
    return list(itertools.islice(loader, count))


def test_the_same_samples_with_any_number_of_workers():
    expected = take(make(), 13)
    assert take(make(), 13) == expected
    assert take(make(num_workers=2), 13) == expected
    assert take(make(seed=4), 13) != expected
    flat = [sample for batch in expected for sample in batch]
    assert len({sample[1:] for sample in flat}) == len(flat)


def test_images_are_grouped_by_shape():
    wide = {image["image_id"]: image["width"] > image["height"] for image in DATA}
    batches = take(make(), 20)
    assert all(wide[a[0]] == wide[b[0]] for a, b in batches)
    mixed = take(make(groups=None), 20)
    assert any(wide[a[0]] != wide[b[0]] for a, b in mixed)


@pytest.mark.parametrize(("processes", "grouped"), [(1, True), (1, False), (3, True)])
def test_epochs_count_the_images_of_all_processes(processes, grouped):
    changes = {} if grouped else {"groups": None}
    loader = make(processes=processes, rank=processes - 1, **changes)
    assert loader.epoch == 0
    for batches, _ in enumerate(itertools.islice(loader, 20), start=1):
        # 11 images, 2 in a batch of each process.
        assert loader.epoch == pytest.approx(batches * 2 * processes / 11)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert other.epoch == loader.epoch


def test_an_epoch_has_repeated_images_as_often_as_they_come():
    repeat = [3.0, *[1.0] * 10]
    loader = TrainLoader(DATA, draw, EpochOrder(11, repeat=repeat), seed=3, batch_size=1)
    seen = []
    for (sample,) in itertools.islice(loader, 39):
        seen.append(sample[0])
        assert loader.epoch == pytest.approx(len(seen) / 13)
    assert seen.count(0) == 9


def test_training_draws_the_same_numbers_whatever_loads():
    def numbers(**changes) -> list[float]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        take(make(**changes), 3)
        return [torch.rand(1).item(), np.random.rand(), random.random()]

    assert numbers() == numbers(num_workers=1) == numbers(batch_size=1)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_it_goes_on_after_the_last_batch_taken(before, after):
    expected = take(make(), 12)
    loader = make(num_workers=before)
    assert take(loader, 5) == expected[:5]  # workers are ahead of it
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(num_workers=after, seed=99)  # the saved seed counts
    resumed.load_state_dict(state)
    assert take(resumed, 7) == expected[5:]
    assert resumed.state_dict()["epoch"] == 2


def test_other_numbers_of_processes_are_said(caplog):
    loader = make()
    take(loader, 8)
    resumed = [make(rank=rank, processes=2) for rank in range(2)]
    for one in resumed:
        one.load_state_dict(loader.state_dict())
    assert "2 processes x 2 images instead of 1 x 2: goes on from image" in caplog.text
    both = [take(one, 3) for one in resumed]
    assert [batch for pair in zip(*both, strict=True) for batch in pair] == take(loader, 6)


def test_other_data_are_said(caplog):
    loader = make()
    take(loader, 4)
    done = loader.state_dict()["offset"]
    larger = make([{**image, "image_id": 100 * k + i} for k in range(2) for i, image in enumerate(DATA)])
    larger.load_state_dict(loader.state_dict())
    assert f"other training data (22 images, 11 before): goes on from image {2 * done} of epoch 0" in (
        caplog.text
    )
    assert larger.state_dict()["offset"] == 2 * done
    take(larger, 12)
    caplog.clear()
    moved = make([{**image, "file_name": f"/elsewhere/{i}.jpg"} for i, image in enumerate(DATA)])
    moved.load_state_dict(loader.state_dict())
    assert "other training data" not in caplog.text
    fewer = make([{**image, "annotations": [{}]} for image in DATA])
    fewer.load_state_dict(loader.state_dict())
    assert "other training data" in caplog.text


def test_a_run_without_a_position_goes_on_in_the_same_epoch():
    loader = make()
    loader.skip(25)
    take(loader, 1)
    state = loader.state_dict()
    assert state["epoch"] == 2
    assert state["position"] >= 27


def signal_and_draw(image: dict) -> tuple:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    torch.ones(200, 200) @ torch.ones(200, 200)  # starts a library's threads
    return draw(image)


def test_workers_leave_stop_signals_to_their_parent():
    torch.ones(200, 200) @ torch.ones(200, 200)
    expected = take(make(), 6)
    for _ in range(5):
        assert take(make(mapper=signal_and_draw, num_workers=2), 6) == expected
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_workers_end_when_their_parent_wants_it():
    loader = make(num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == 0
    loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("early", [False, True])
def test_workers_end_when_their_parent_is_killed(early):
    """Early: before PyTorch's own watch over the parent begins in them, which notices nothing then."""
    theirs, ours = multiprocessing.Pipe()

    def load_and_wait() -> None:
        if early:
            torch.set_num_threads = lambda _: time.sleep(1)  # what a worker does first
        batches = iterate(DataLoader(range(9), num_workers=2))
        if not early:
            list(itertools.islice(batches, 2))  # one of each worker
        ours.send([worker.pid for worker in multiprocessing.active_children()])
        time.sleep(60)

    parent = multiprocessing.get_context("fork").Process(target=load_and_wait)
    parent.start()
    workers = theirs.recv()
    assert len(workers) == 2
    parent.kill()
    parent.join()
    until = time.monotonic() + 60  # workers look for their parent every 5 seconds
    try:
        while any(alive(worker) for worker in workers):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_closing_ends_the_workers_and_keeps_the_place():
    loader = make(num_workers=1)
    expected = take(make(), 4)
    batches = iter(loader)
    assert next(batches) == expected[0]
    assert multiprocessing.active_children()
    loader.close()
    assert not multiprocessing.active_children()
    assert take(loader, 3) == expected[1:]


def draw_or_fail(image: dict) -> tuple:
    if image["image_id"] in (2, 7):
        raise OSError("cut short\nat the end")
    return draw(image)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_used_costs_only_itself(workers, caplog):
    loader = make(mapper=draw_or_fail, num_workers=workers, max_bad_fraction=0.2)
    batches = take(loader, 12)
    whole = take(make(), 12)
    replaced = 0
    for sample, other in zip(itertools.chain(*batches), itertools.chain(*whole), strict=True):
        if other[0] in (2, 7):
            assert sample[0] not in (2, 7)
            replaced += 1
        else:
            assert sample == other
    assert replaced == 4
    assert batches == take(make(mapper=draw_or_fail), 12)  # the same others, however it is loaded
    bad = loader.take_bad()
    assert {image.index for image in bad} == {2, 7}
    assert not loader.take_bad()
    loader.count_bad(bad)
    assert "without /data/7.jpg (id 7): OSError: cut short at the end" in caplog.text
    assert caplog.text.count("Training goes on without") == 2

    state = loader.state_dict()
    with pytest.raises(BadDataError, match=r"MAX_BAD_FRACTION is 0\.2: 3 of 11 images cannot .*: x: y; mend"):
        loader.count_bad([BadImage(4, "x", "y")])
    resumed = make(max_bad_fraction=0.2)
    resumed.load_state_dict(state)
    resumed.count_bad(bad)
    with pytest.raises(BadDataError):
        resumed.count_bad([BadImage(4, "x", "y")])


def fail(image: dict) -> tuple:
    raise ValueError(f"no {image['image_id']}")


def test_no_image_can_be_used():
    with pytest.raises(
        BadDataError, match=r"20 images in turn cannot be used: .*/data/\d+\.jpg .*ValueError: no"
    ):
        take(make(mapper=fail), 1)


def test_images_that_the_mapper_passes_over_are_no_faults():
    loader = make(mapper=lambda image: None if image["image_id"] == 2 else draw(image))
    assert all(sample[0] != 2 for batch in take(loader, 12) for sample in batch)
    assert not loader.take_bad()


def test_boxes_that_are_not_finite_are_of_no_use():
    def mapper(image: dict) -> dict:
        boxes = torch.zeros(1, 4)
        boxes[0, 0] = float("nan") if image["image_id"] == 2 else 0
        return {"instances": Instances((5, 5), gt_boxes=Boxes(boxes)), "image_id": image["image_id"]}

    loader = make(mapper=mapper, check=check_sample)
    assert all(sample["image_id"] != 2 for batch in take(loader, 12) for sample in batch)
    assert {bad.reason for bad in loader.take_bad()} == {
        "ValueError: gt_boxes has numbers that are not finite"
    }
