from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.data import samplers

from nonlocal_det.data.order import BatchOrder, EpochOrder

SIZE = 23
GROUPS = [1 if i % 3 else 0 for i in range(SIZE)]


def take(order: BatchOrder, count: int, state: dict, rank: int = 0, processes: int = 1):
    return list(itertools.islice(order.batches(state, rank, processes), count))


def test_an_epoch_has_each_image_once_and_epochs_and_seeds_differ():
    order = EpochOrder(SIZE)
    epochs = {tuple(order(seed, epoch)) for seed in (0, 1) for epoch in range(4)}
    assert len(epochs) == 8
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert np.array_equal(order(1, 3), EpochOrder(SIZE)(1, 3))


def test_positions_count_the_samples_of_all_epochs():
    batches = [batch for batch, _ in take(BatchOrder(EpochOrder(SIZE), 2), 30, {"seed": 4})]
    samples = [sample for batch in batches for sample in batch]
    assert [sample.position for sample in samples] == list(range(60))
    expected = np.concatenate([EpochOrder(SIZE)(4, epoch) for epoch in range(3)])
    assert [sample.index for sample in samples] == expected[:60].tolist()


def test_a_batch_has_images_of_one_group_and_none_is_lost():
    batches = [batch for batch, _ in take(BatchOrder(EpochOrder(SIZE), 4, GROUPS), 200, {"seed": 0})]
    assert all(len({GROUPS[sample.index] for sample in batch}) == 1 for batch in batches)
    positions = sorted(sample.position for batch in batches for sample in batch)
    assert len(set(positions)) == 800
    assert positions[-1] < 800 + 2 * 3  # no more than fewer than a batch of each group waits


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_batches(processes):
    order = BatchOrder(EpochOrder(SIZE), 2, GROUPS)
    one = [batch for batch, _ in take(order, 12 * processes, {"seed": 0})]
    shares = [take(order, 12, {"seed": 0}, rank, processes) for rank in range(processes)]
    for number in range(12):
        assert [share[number][0] for share in shares] == one[number * processes : (number + 1) * processes]
        assert all(share[number][1] == shares[0][number][1] for share in shares)


@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("processes", [1, 2])
def test_it_goes_on_from_every_state(groups, processes):
    order = BatchOrder(EpochOrder(SIZE), 3, groups)
    whole = take(order, 40, {"seed": 7}, processes - 1, processes)
    for number in range(0, 39, 2):
        state = json.loads(json.dumps(whole[number][1]))  # plain containers
        rest = take(BatchOrder(EpochOrder(SIZE), 3, groups), 39 - number, state, processes - 1, processes)
        assert rest == whole[number + 1 :]


def test_other_numbers_of_processes_and_images_lose_and_repeat_nothing():
    state, seen = {"seed": 0}, []
    for batch_size, processes in ((4, 2), (2, 4), (8, 1), (1, 3), (3, 2)):
        order = BatchOrder(EpochOrder(SIZE), batch_size, GROUPS)
        shares = [take(order, 5, state, rank, processes) for rank in range(processes)]
        seen += [sample.position for share in shares for batch, _ in share for sample in batch]
        state = shares[0][-1][1]
    waiting = [position for position, _ in state["waiting"]]
    assert sorted(seen + waiting) == list(range(state["position"]))


def test_orders_like_detectron2s_samplers():
    plain = EpochOrder.like(samplers.TrainingSampler(SIZE, shuffle=False), SIZE)
    assert plain(0, 0).tolist() == list(range(SIZE))

    subset = EpochOrder.like(samplers.RandomSubsetTrainingSampler(SIZE, 0.5, seed_subset=0), SIZE)
    epochs = [subset(3, epoch).tolist() for epoch in range(3)]
    assert len(set(epochs[0])) == len(epochs[0]) == SIZE // 2
    assert sorted(epochs[0]) == sorted(epochs[1]) != epochs[1] != epochs[2]

    factors = torch.tensor([1.0, 2.0, 1.25] + [1.0] * (SIZE - 3))
    repeat = EpochOrder.like(samplers.RepeatFactorTrainingSampler(factors), SIZE)
    counts = np.mean([np.bincount(repeat(0, epoch), minlength=SIZE) for epoch in range(400)], axis=0)
    assert counts == pytest.approx(factors.numpy(), abs=0.1)
    assert counts[:2].tolist() == [1, 2]

    with pytest.raises(TypeError, match="InferenceSampler"):
        EpochOrder.like(samplers.InferenceSampler(SIZE), SIZE)


def test_repeated_images_resume_too():
    order = BatchOrder(EpochOrder(SIZE, repeat=[1.5] * SIZE), 2, GROUPS)
    whole = take(order, 60, {"seed": 7})
    assert take(order, 20, whole[39][1]) == whole[40:]
