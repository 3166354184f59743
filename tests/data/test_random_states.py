from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det.data.random_states import isolated_randomness, random_states, set_random_states


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_states_survive_a_file(tmp_path):
    draw()  # so that a second Gauss number waits
    torch.save(random_states(), tmp_path / "states.pth")
    expected = [draw(), draw()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    set_random_states(torch.load(tmp_path / "states.pth", weights_only=True))
    assert [draw(), draw()] == expected


def test_what_is_drawn_inside_leaves_no_trace():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    first, expected = draw(), draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert draw() == first
    with pytest.raises(ZeroDivisionError), isolated_randomness(np.random.SeedSequence(1)):
        draw()[len(draw()) // 0]
    assert draw() == expected


def test_what_is_drawn_inside_follows_from_the_seed():
    def inside(seed: int | None) -> list[float]:
        with isolated_randomness(None if seed is None else np.random.SeedSequence(seed)):
            return draw()

    assert inside(1) == inside(1)
    assert all(a != b for a, b in zip(inside(1), inside(2), strict=True))
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert inside(None) == inside(None) == draw()
