from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det.data.sample_order import EpochOrder
from nonlocal_det.data.train_loader import TrainLoader

DATA = [
    {"file_name": f"/data/{i}.jpg", "image_id": i, "width": 4 + i % 3, "height": 5, "annotations": []}
    for i in range(11)
]


def draw(image: dict) -> tuple:
    """A mapper that draws from every generator."""
    return image["image_id"], random.random(), np.random.rand(), torch.rand(1).item()


def make(data: list = DATA, mapper=draw, **changes) -> TrainLoader:
    options = {"seed": 3, "batch_size": 2, **changes}
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
    mixed = take(make(group_by_aspect_ratio=False), 20)
    assert any(wide[a[0]] != wide[b[0]] for a, b in mixed)


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
    assert not caplog.text
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
    return draw(image)


def test_workers_leave_stop_signals_to_their_parent():
    assert take(make(mapper=signal_and_draw, num_workers=1), 3) == take(make(), 3)


def test_workers_end_when_their_parent_wants_it():
    loader = make(num_workers=2)
    take(loader, 1)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == 0
    loader.close()


def test_closing_ends_the_workers_and_keeps_the_place():
    loader = make(num_workers=1)
    expected = take(make(), 4)
    assert take(loader, 2) == expected[:2]
    loader.close()
    assert not multiprocessing.active_children()
    assert take(loader, 2) == expected[2:]


def test_images_without_a_size():
    data = [{"file_name": "a.jpg"}]
    with pytest.raises(KeyError, match="width"):
        make(data)
    make(data, group_by_aspect_ratio=False)
