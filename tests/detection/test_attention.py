"""Attention of blocks in a keypoint head, against the whole matrix of Eq. 1."""

from __future__ import annotations

import numpy as np
import torch
from attention_reference import KEYPOINT_RCNN, NETWORK, PICTURE, detector, matrix, run

from nonlocal_det.attention import AttentionRecorder
from nonlocal_det.detection.attention import record_attention


def test_keypoint_head_uses_the_best_instance_that_holds_the_point(small_options):
    model = detector(small_options, KEYPOINT_RCNN)
    recorder = record_attention(model)
    inputs, heads, output = run(model, recorder)
    assert len(output) > 1
    boxes = heads["boxes"] / 2  # to the picture
    worst = int(heads["scores"].argmin())
    point = tuple(((boxes[worst, :2] + boxes[worst, 2:]) / 2).tolist())
    holding = [
        k
        for k, (x0, y0, x1, y1) in enumerate(boxes.tolist())
        if x0 <= point[0] <= x1 and y0 <= point[1] <= y1
    ]
    chosen = max(holding, key=lambda k: float(heads["scores"][k]))

    found = recorder.attention([point], PICTURE, NETWORK)

    assert [block.short_name for block in found] == ["res4.non_local_22"] + [
        f"keypoint_head.non_local_{k}" for k in (2, 4, 6, 8)
    ]
    x0, y0, x1, y1 = boxes[chosen].tolist()
    for block in found[1:]:
        (row,) = block.rows
        x = inputs[block.name][chosen]
        rows, columns = x.shape[1:]
        cell = (int((point[1] - y0) / (y1 - y0) * rows), int((point[0] - x0) / (x1 - x0) * columns))
        assert row.cell == cell
        np.testing.assert_allclose(row.roi, (x0, y0, x1, y1), rtol=1e-5)
        with torch.no_grad():
            expected = matrix(dict(model.named_modules())[block.name], x, "embedded_gaussian", "input")
        np.testing.assert_allclose(row.weights, expected[cell].numpy(), rtol=1e-4, atol=1e-6)
        # Keys of 2 x 2 cells share the box evenly.
        np.testing.assert_allclose(row.key_centers()[0], x0 + (np.arange(7) + 0.5) / 7 * (x1 - x0), rtol=1e-4)
        assert 0 <= block.difference <= 1


def test_keypoint_head_without_an_instance(small_options):
    model = detector(small_options, KEYPOINT_RCNN, MODEL__ROI_HEADS__SCORE_THRESH_TEST=1.0)
    recorder = record_attention(model)
    *_, output = run(model, recorder)
    assert len(output) == 0
    first, *others = recorder.attention([(5.0, 5.0)], PICTURE, NETWORK)
    assert len(first.rows) == 1
    assert len(others) == 4
    for block in others:
        assert not block.rows
        assert block.notes == ["no instance was detected"]

    model = detector(small_options, KEYPOINT_RCNN)
    recorder = record_attention(model)
    _, heads, _ = run(model, recorder)
    boxes = (heads["boxes"] / 2).tolist()
    free = next(
        (x + 0.5, y + 0.5)
        for y in range(PICTURE[0])
        for x in range(PICTURE[1])
        if not any(x0 <= x + 0.5 <= x1 and y0 <= y + 0.5 <= y1 for x0, y0, x1, y1 in boxes)
    )
    block = recorder.attention([free], PICTURE, NETWORK)[1]
    assert block.notes == [f"no detected instance holds the pixel {int(free[0])},{int(free[1])}"]


def test_a_recorder_that_is_not_told_of_the_head_keeps_to_the_backbone(small_options):
    model = detector(small_options, KEYPOINT_RCNN)
    recorder = AttentionRecorder(model)
    run(model, recorder)
    (found,) = recorder.attention([(5.0, 5.0)], PICTURE, NETWORK)
    assert found.short_name == "res4.non_local_22"
