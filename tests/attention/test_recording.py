"""Attention over a picture, against the whole matrix of Eq. 1 worked out from what a block gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model

from nonlocal_det import get_config
from nonlocal_det.attention import (
    AttentionRecorder,
    AttentionRow,
    BlockAttention,
    draw_attention,
    row_difference,
    save_attention,
)

MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT_RCNN = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
FORMS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")

# A picture of 60 x 100 pixels is resized twofold; padded to 128 x 224 it is a map of 8 x 14 at stride 16.
PICTURE, NETWORK, GRID = (60, 100), (120, 200), (8, 14)


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (3, *NETWORK), generator=torch.Generator().manual_seed(seed)).float()


def detector(small_options, config: str = MASK_RCNN, **changes):
    """A detector with random weights, whose batch norms know noise: features are then of ordinary size."""
    torch.manual_seed(0)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    model = build_model(get_config(config, small_options(changes)))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.backbone.train()(model.preprocess_image([{"image": noise()}]).tensor)
    return model.eval()


def run(model):
    """Run the model on noise; return what every block and every keypoint head got, besides the recorder."""
    inputs, heads, handles = {}, {}, []
    for name, module in model.named_modules():
        if hasattr(module, "attention") and hasattr(module, "w_z"):
            hook = lambda _, args, name=name: inputs.__setitem__(name, args[0].clone())  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        if name.endswith("keypoint_head"):

            def keep(_, args):
                heads["boxes"] = args[1][0].pred_boxes.tensor.clone()
                heads["scores"] = args[1][0].scores.clone()

            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad(), AttentionRecorder(model) as recorder:
        output = model([{"image": noise(), "height": PICTURE[0], "width": PICTURE[1]}])[0]["instances"]
    for handle in handles:
        handle.remove()
    return recorder, inputs, heads, output


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The greatest of every 2 x 2 cells of x (C, H, W)."""
    c, h, w = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(c, h // 2, 2, w // 2, 2).amax(dim=(2, 4))


def matrix(block, x: torch.Tensor, pairwise: str, pool: str) -> torch.Tensor:
    """f(x_i, x_j) / C(x) for all i and j, x (C, H, W): [H, W, key rows, key columns]."""

    def project(layer, values):
        return torch.einsum("dc,chw->dhw", layer.weight[:, :, 0, 0], values) + layer.bias[:, None, None]

    source = pooled(x) if pool == "input" else x
    if pairwise == "gaussian":
        theta, phi = x, source
    else:
        theta, phi = project(block.theta, x), project(block.phi, source)
    if pool == "embedding":
        phi = pooled(phi)
    if pairwise == "concatenation":
        half = len(theta)
        a = torch.einsum("d,dhw->hw", block.w_f.weight[0, :half], theta)
        b = torch.einsum("d,dhw->hw", block.w_f.weight[0, half:], phi)
        return (a[:, :, None, None] + b).clamp_min(0) / phi[0].numel()
    products = torch.einsum("dhw,dij->hwij", theta, phi)
    if pairwise == "dot_product":
        return products / phi[0].numel()
    products = products / len(theta) ** 0.5
    return products.flatten(2).softmax(dim=2).view_as(products)


@pytest.mark.parametrize("pool", ["input", "embedding", "none"])
@pytest.mark.parametrize("pairwise", FORMS)
def test_rows_of_the_matrix(small_options, pairwise, pool):
    changes = {"MODEL__NONLOCAL__PAIRWISE": pairwise, "MODEL__NONLOCAL__POOL": pool}
    model = detector(small_options, **changes)
    recorder, inputs, _, _ = run(model)
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
    recorder, inputs, _, _ = run(model)
    (found,) = recorder.attention([(50.5, 30.5)], PICTURE, NETWORK)
    assert found.short_name == name
    assert inputs[found.name].shape[2:] == (128 // stride, 224 // stride)
    (row,) = found.rows
    assert row.cell == (int(61 / stride), int(101 / stride))
    np.testing.assert_allclose(np.diff(row.key_centers()[0]), stride / 2)


def test_retinanet(small_options):
    model = detector(small_options, "Ablations/retinanet_R_50_FPN_1x_nl.yaml")
    recorder, inputs, _, _ = run(model)
    (found,) = recorder.attention([(37.5, 20.5)], PICTURE, NETWORK)
    block = dict(model.named_modules())[found.name]
    with torch.no_grad():
        expected = matrix(block, inputs[found.name][0], "embedded_gaussian", "input")
    np.testing.assert_allclose(found.rows[0].weights, expected[found.rows[0].cell].numpy(), atol=1e-6)


def test_keypoint_head_uses_the_best_instance_that_holds_the_point(small_options):
    model = detector(small_options, KEYPOINT_RCNN)
    recorder, inputs, heads, output = run(model)
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
    recorder, _, _, output = run(model)
    assert len(output) == 0
    first, *others = recorder.attention([(5.0, 5.0)], PICTURE, NETWORK)
    assert len(first.rows) == 1
    assert len(others) == 4
    for block in others:
        assert not block.rows
        assert block.notes == ["no instance was detected"]

    model = detector(small_options, KEYPOINT_RCNN)
    recorder, _, heads, _ = run(model)
    boxes = (heads["boxes"] / 2).tolist()
    free = next(
        (x + 0.5, y + 0.5)
        for y in range(PICTURE[0])
        for x in range(PICTURE[1])
        if not any(x0 <= x + 0.5 <= x1 and y0 <= y + 0.5 <= y1 for x0, y0, x1, y1 in boxes)
    )
    block = recorder.attention([free], PICTURE, NETWORK)[1]
    assert block.notes == [f"no detected instance holds the pixel {int(free[0])},{int(free[1])}"]


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
        AttentionRecorder(detector(small_options, "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"))
    recorder, *_ = run(detector(small_options))
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
