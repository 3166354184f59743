"""Attention over a picture, against the whole matrix of Eq. 1 worked out from what a block gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_reference import FORMS, GRID, MASK_RCNN, NETWORK, PICTURE, detector, matrix, run

from nonlocal_det.attention import (
    AttentionRecorder,
    AttentionRow,
    BlockAttention,
    draw_attention,
    row_difference,
    save_attention,
)


@pytest.mark.parametrize("pool", ["input", "embedding", "none"])
@pytest.mark.parametrize("pairwise", FORMS)
def test_rows_of_the_matrix(small_options, pairwise, pool):
    changes = {"MODEL__NONLOCAL__PAIRWISE": pairwise, "MODEL__NONLOCAL__POOL": pool}
    model = detector(small_options, **changes)
    recorder = AttentionRecorder(model)
    inputs, *_ = run(model, recorder)
    points = [(0.5, 0.5), (37.5, 20.5), (99.5, 59.5)]

    (found,) = recorder.attention(points, PICTURE, NETWORK)

    assert found.name == "backbone.bottom_up.res4.non_local_5"
    assert found.short_name == "res4.non_local_5"
    assert found.pairwise == pairwise
    x = inputs[found.name][0]
    assert x.shape[1:] == GRID
    # 16 pixels of the network's input are 8 of the picture.
    cells = [(0, 0), (2, 4), (7, 12)]
    assert [row.cell for row in found.rows] == cells
    with torch.no_grad():
        expected = matrix(dict(model.named_modules())[found.name], x, pairwise, pool)
    for row, (i, j), point in zip(found.rows, cells, points, strict=True):
        assert row.point == point
        assert row.roi is None
        np.testing.assert_allclose(row.weights, expected[i, j].numpy(), rtol=1e-4, atol=1e-6)
        keys_x, keys_y = row.key_centers()
        side = 8 if pool == "none" else 16
        np.testing.assert_allclose(keys_x, side * (np.arange(row.weights.shape[1]) + 0.5))
        np.testing.assert_allclose(keys_y, side * (np.arange(row.weights.shape[0]) + 0.5))

    # A fixed grid of 8 x 8 points, 7.5 and 12.5 pixels apart; no two fall into one cell.
    probes = [
        expected[int((a + 0.5) * 7.5 // 8), int((b + 0.5) * 12.5 // 8)] for a in range(8) for b in range(8)
    ]
    apart = [
        float((a - b).abs().sum() / (a.abs().sum() + b.abs().sum()).clamp_min(1e-30))
        for k, a in enumerate(probes)
        for b in probes[:k]
    ]
    assert found.difference == pytest.approx(np.mean(apart), rel=1e-3)
    assert 0.01 < found.difference < 0.99


@pytest.mark.parametrize(
    ("changes", "name", "stride"),
    [
        ({"MODEL__NONLOCAL__RES4": [0]}, "res4.non_local_0", 8),
        ({"MODEL__NONLOCAL__RES4": [6]}, "res4.non_local_6", 16),
        ({"MODEL__NONLOCAL__RES4": [], "MODEL__NONLOCAL__RES3": [2]}, "res3.non_local_2", 8),
        ({"MODEL__NONLOCAL__RES4": [], "MODEL__NONLOCAL__RES2": [1]}, "res2.non_local_1", 4),
        ({"MODEL__NONLOCAL__RES4": [], "MODEL__NONLOCAL__RES5": [1]}, "res5.non_local_1", 32),
    ],
)
def test_stride_of_the_place(small_options, changes, name, stride):
    model = detector(small_options, MODEL__NONLOCAL__POOL="none", **changes)
    recorder = AttentionRecorder(model)
    inputs, *_ = run(model, recorder)
    (found,) = recorder.attention([(50.5, 30.5)], PICTURE, NETWORK)
    assert found.short_name == name
    assert inputs[found.name].shape[2:] == (128 // stride, 224 // stride)
    (row,) = found.rows
    assert row.cell == (int(61 / stride), int(101 / stride))
    np.testing.assert_allclose(np.diff(row.key_centers()[0]), stride / 2)


def test_retinanet(small_options):
    model = detector(small_options, "Ablations/retinanet_R_50_FPN_1x_nl.yaml")
    recorder = AttentionRecorder(model)
    inputs, *_ = run(model, recorder)
    (found,) = recorder.attention([(37.5, 20.5)], PICTURE, NETWORK)
    block = dict(model.named_modules())[found.name]
    with torch.no_grad():
        expected = matrix(block, inputs[found.name][0], "embedded_gaussian", "input")
    np.testing.assert_allclose(found.rows[0].weights, expected[found.rows[0].cell].numpy(), atol=1e-6)


def test_recording_changes_nothing(small_options):
    model = detector(small_options)
    image = torch.rand(3, 64, 96) * 255
    with torch.no_grad():
        before = model([{"image": image}])[0]["instances"].pred_boxes.tensor
        with AttentionRecorder(model):
            during = model([{"image": image}])[0]["instances"].pred_boxes.tensor
    assert torch.equal(before, during)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_refusals(small_options):
    with pytest.raises(ValueError, match=r"RES4 \[-1\]"):
        AttentionRecorder(detector(small_options, MASK_RCNN.replace("_nl", "")))
    model = detector(small_options)
    recorder = AttentionRecorder(model)
    run(model, recorder)
    with pytest.raises(ValueError, match="100,5 is outside"):
        recorder.attention([(100, 5)], PICTURE, NETWORK)


def test_row_difference():
    assert row_difference(torch.tensor([[0.5, 0.5, 0.0]] * 3)) == 0
    assert row_difference(torch.eye(3)) == 1
    assert row_difference(torch.tensor([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx(0.5)
    assert row_difference(torch.tensor([[1.0, -2.0], [-1.0, 2.0]])) == 1
    assert row_difference(torch.zeros(2, 4)) == 0


def rows() -> list[AttentionRow]:
    weights = np.zeros((4, 5), np.float32)
    weights[1, 3], weights[2, 0], weights[3, 4] = 0.6, 0.3, 0.1
    # Keys of 20 pixels: the last row and column lie beyond a picture of 60 x 80.
    whole = AttentionRow((10.5, 10.5), (0, 0), weights, (0, 0, 100, 80))
    return [whole, AttentionRow((40.5, 30.5), (3, 3), weights - 0.2, (20, 10, 60, 50), roi=(20, 10, 60, 50))]


def test_strongest():
    whole, signed = rows()
    assert [e[:2] for e in whole.strongest(20, (60, 80))] == [(70, 30), (10, 50)]  # no zero, no padding
    assert [e[2] for e in whole.strongest(20, (60, 80))] == pytest.approx([0.6, 0.3])
    assert len(signed.strongest(20, (60, 80))) == 20
    assert signed.strongest(1, (60, 80))[0][2] == pytest.approx(0.4)


def test_drawing_and_saving(tmp_path):
    picture = np.full((60, 80, 3), 128, np.uint8)
    found = BlockAttention("roi_heads.keypoint_head.non_local_2", "dot_product", rows(), [], 0.25)
    before = picture.copy()

    drawn = draw_attention(picture, found)

    np.testing.assert_array_equal(picture, before)
    assert drawn.dtype == np.uint8
    assert drawn.shape[1] > 1200
    blue, green, red = (drawn[:, :, k].astype(int) for k in range(3))
    # The arrow on the left, from (10.5, 10.5) to (70, 30), in the first of two panels of 640 pixels.
    arrow = (red - green > 100) & (red - blue > 100)
    ys, xs = np.nonzero(arrow[:, :660])
    assert xs.max() - 14 == pytest.approx(70 * 8, abs=12)
    assert ys[xs.argmax()] - 34 == pytest.approx(30 * 8, abs=12)
    # Negative weights are blue on the right, in the second row.
    assert ((blue - red)[520:, 660:] > 60).sum() > 1000

    save_attention(tmp_path / "weights.npz", [found, BlockAttention("other", "gaussian")])
    with np.load(tmp_path / "weights.npz") as saved:
        name = found.name
        np.testing.assert_array_equal(saved[f"{name}/weights"], [row.weights for row in found.rows])
        np.testing.assert_array_equal(saved[f"{name}/points"], [(10.5, 10.5), (40.5, 30.5)])
        np.testing.assert_array_equal(saved[f"{name}/cells"], [(0, 0), (3, 3)])
        np.testing.assert_allclose(saved[f"{name}/keys_x"][0], [10, 30, 50, 70, 90])
        np.testing.assert_allclose(saved[f"{name}/keys_y"][1], [15, 25, 35, 45])
        assert saved[f"{name}/difference"] == 0.25
        assert np.isnan(saved["other/difference"])
        assert "other/weights" not in saved
