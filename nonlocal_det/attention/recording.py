"""Where a non-local block looks: the weights f(x_i, x_j) / C(x) of Eq. 1 over a picture (Figures 1 and 3).

    with AttentionRecorder(model) as recorder:
        model([{"image": image, "height": height, "width": width}])
    found = recorder.attention([(320.5, 240.5)], (height, width), image.shape[1:])

Three frames of reference are in play. A *point* is (x, y) in pixels of the upright picture, continuous: the
first pixel is [0, 1). The *network input* is the picture resized, then padded at its right and bottom. A
*cell* is (row, column) of the map that a block gets. A cell of a map with stride s covers s x s pixels of the
network input; a cell of a RoI covers its share of the RoI's box. Keys that are pooled cover 2 x 2 cells.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from detectron2.modeling import ResNet
from detectron2.modeling.roi_heads.keypoint_head import BaseKeypointRCNNHead
from detectron2.structures import Instances
from torch import Tensor, nn

from nonlocal_det.layers import NonLocalBlock

# Queries on each axis, evenly spaced, for the difference between rows.
_PROBES = 8


@dataclass(frozen=True)
class AttentionRow:
    """What one position of one block attends to.

    Attributes:
        point: the point (x, y) asked for, in picture pixels.
        cell: (row, column) of the block's input that holds the point.
        weights: f(x_i, x_j) / C(x) over the key grid, array (rows, columns), float32. The two Gaussian
            functions sum to 1; "dot_product" may be negative.
        area: the box (x0, y0, x1, y1) that the key grid covers, in picture pixels. It may reach beyond the
            picture (the padding) or stop short of its end (an odd last row or column is not pooled).
        roi: the box (x0, y0, x1, y1) of the instance whose features the block got, in picture pixels; None
            for a block that sees the whole picture.
    """

    point: tuple[float, float]
    cell: tuple[int, int]
    weights: np.ndarray
    area: tuple[float, float, float, float]
    roi: tuple[float, float, float, float] | None = None

    def key_centers(self) -> tuple[np.ndarray, np.ndarray]:
        """The centres of the key cells in picture pixels: x (columns,) and y (rows,)."""
        rows, columns = self.weights.shape
        x0, y0, x1, y1 = self.area
        x = x0 + (np.arange(columns) + 0.5) * ((x1 - x0) / columns)
        y = y0 + (np.arange(rows) + 0.5) * ((y1 - y0) / rows)
        return x, y

    def strongest(self, count: int, picture_size: tuple[int, int]) -> list[tuple[float, float, float]]:
        """The highest-weighted positions inside the picture.

        Args:
            count: how many.
            picture_size: (height, width); keys in the padding beyond it are left out.

        Returns:
            At most ``count`` of (x, y, weight), the highest weight first. A weight of exactly 0 is left
            out: the ReLU of Eq. 5 has switched that key off.
        """
        x, y = self.key_centers()
        inside = (y[:, None] < picture_size[0]) & (x[None, :] < picture_size[1]) & (self.weights != 0)
        rows, columns = np.nonzero(inside)
        weights = self.weights[rows, columns]
        order = np.argsort(-weights, kind="stable")[:count]
        return [(float(x[columns[k]]), float(y[rows[k]]), float(weights[k])) for k in order]


@dataclass(frozen=True)
class BlockAttention:
    """The rows of one block for the points asked for.

    Attributes:
        name: the block's name in the model, as in ``named_modules``.
        pairwise: its f: "embedded_gaussian", "gaussian", "dot_product" or "concatenation".
        rows: one for every point that the block can answer.
        notes: a line for every point that it cannot.
        difference: :func:`row_difference` over a fixed grid of positions, whatever was asked for; NaN where
            the block got no input or a single position.
    """

    name: str
    pairwise: str
    rows: list[AttentionRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    difference: float = float("nan")

    @property
    def short_name(self) -> str:
        """The last parts of the name: ``res4.non_local_5``, ``keypoint_head.non_local_2``."""
        return ".".join(self.name.split(".")[-2:])


class AttentionRecorder:
    """Keeps what the non-local blocks of a detector get during an inference, and asks them about it.

    Only the inputs are kept; the weights are computed afterwards, for the positions asked for alone, by
    :meth:`NonLocalBlock.attention`. Inside the ``with`` block run the model in eval mode, on one picture.

    Args:
        model: a detector with blocks in a ResNet's stages or in a keypoint head.

    Raises:
        ValueError: the model has no such block.
    """

    def __init__(self, model: nn.Module) -> None:
        self._blocks = {n: m for n, m in model.named_modules() if isinstance(m, NonLocalBlock)}
        strides = _strides(model)
        heads = [m for m in model.modules() if isinstance(m, BaseKeypointRCNNHead)]
        # Of a block: the pixels of the network input that a cell covers, or the head that it is part of.
        self._places: dict[str, int | nn.Module] = {}
        for name, block in self._blocks.items():
            head = next((h for h in heads if any(m is block for m in h.modules())), None)
            if block in strides or head is not None:
                self._places[name] = strides.get(block, head)
        if not self._places:
            raise ValueError(
                "the model has no non-local block to draw; set MODEL.NONLOCAL.RES4 [-1] or use a config "
                "whose name has _nl"
            )
        self._inputs: dict[str, Tensor] = {}
        self._instances: dict[nn.Module, Instances] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> AttentionRecorder:
        self._inputs.clear()
        self._instances.clear()
        for name, place in self._places.items():
            hook = self._keep_input(name)
            self._handles.append(self._blocks[name].register_forward_pre_hook(hook))
            if isinstance(place, nn.Module) and place not in self._instances:
                self._handles.append(place.register_forward_pre_hook(self._keep_instances))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def attention(
        self,
        points: Sequence[tuple[float, float]],
        picture_size: tuple[int, int],
        network_size: tuple[int, int],
    ) -> list[BlockAttention]:
        """Compute the rows of every block for some points.

        A block of the keypoint head is asked about the highest-scoring instance whose box holds the point.

        Args:
            points: (x, y) in pixels of the upright picture.
            picture_size: (height, width) of the upright picture.
            network_size: (height, width) of the resized picture that the model got, before its padding.

        Returns:
            One entry for every block, in the order of the model.

        Raises:
            ValueError: a point is outside the picture.
        """
        height, width = picture_size
        for x, y in points:
            if not (0 <= x < width and 0 <= y < height):
                raise ValueError(
                    f"the point {x:g},{y:g} is outside the picture of {width} x {height} (width x height)"
                )
        found = []
        for name, place in self._places.items():
            if isinstance(place, nn.Module):
                found.append(self._in_head(name, place, points, picture_size, network_size))
            else:
                found.append(self._in_stage(name, place, points, picture_size, network_size))
        return found

    def _keep_input(self, name: str):  # noqa: ANN202
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._inputs[name] = args[0].detach()

        return hook

    def _keep_instances(self, head: nn.Module, args: tuple[Tensor, list[Instances]]) -> None:
        # A copy: Detectron2 scales the boxes in place afterwards, and drops the empty ones.
        instances = args[1][0]
        kept = Instances(instances.image_size)
        kept.pred_boxes = instances.pred_boxes.clone()
        kept.scores = instances.scores.clone()
        self._instances[head] = kept

    def _in_stage(
        self,
        name: str,
        stride: int,
        points: Sequence[tuple[float, float]],
        picture_size: tuple[int, int],
        network_size: tuple[int, int],
    ) -> BlockAttention:
        block, x = self._blocks[name], self._inputs[name]
        rows, columns = x.shape[2:]
        across, down = stride * picture_size[1] / network_size[1], stride * picture_size[0] / network_size[0]
        area = (0.0, 0.0, columns * across, rows * down)
        answers = _rows(block, x, points, area)
        probes = _grid((0.0, 0.0, float(picture_size[1]), float(picture_size[0])))
        return BlockAttention(name, block.pairwise, answers, [], _difference(block, x, probes, area))

    def _in_head(
        self,
        name: str,
        head: nn.Module,
        points: Sequence[tuple[float, float]],
        picture_size: tuple[int, int],
        network_size: tuple[int, int],
    ) -> BlockAttention:
        block, instances = self._blocks[name], self._instances.get(head)
        if instances is None or len(instances) == 0:
            return BlockAttention(name, block.pairwise, [], ["no instance was detected"])
        x = self._inputs[name]
        scale = torch.tensor(
            [picture_size[1] / network_size[1], picture_size[0] / network_size[0]], dtype=torch.float64
        ).repeat(2)
        boxes = instances.pred_boxes.tensor.cpu().double() * scale
        order = instances.scores.argsort(descending=True, stable=True).tolist()
        answers, notes = [], []
        for point in points:
            holding = (k for k in order if _holds(boxes[k].tolist(), point))
            index = next(holding, None)
            if index is None:
                notes.append(f"no detected instance holds the pixel {int(point[0])},{int(point[1])}")
                continue
            box = tuple(boxes[index].tolist())
            answers += _rows(block, x[index : index + 1], [point], box, roi=box)
        best = tuple(boxes[order[0]].tolist())
        difference = _difference(block, x[order[0] : order[0] + 1], _grid(best), best)
        return BlockAttention(name, block.pairwise, answers, notes, difference)


def row_difference(rows: Tensor) -> float:
    """How much rows of weights differ: the mean over all pairs of |a - b|_1 / (|a|_1 + |b|_1).

    For the two Gaussian functions, whose rows are distributions, this is the mean total variation distance:
    the share of its weight that a row puts where another does not. It is in [0, 1] for every f: 0 means
    that all positions attend alike (the block adds the same vector everywhere), 1 that no two rows share a
    key (or, for a dot product, that they are opposite).

    Args:
        rows: weights (Q, M), Q at least 2.

    Returns:
        The mean; pairs of rows that are both zero count as 0.
    """
    rows = rows.cpu().double()
    norms = rows.abs().sum(dim=1)
    apart = torch.cdist(rows, rows, p=1) / (norms[:, None] + norms[None, :]).clamp_min(1e-300)
    first, second = torch.triu_indices(len(rows), len(rows), offset=1)
    return apart[first, second].mean().item()


def save_attention(path: str | os.PathLike[str], found: Sequence[BlockAttention]) -> None:
    """Write the weights of all blocks to an ``.npz`` file.

    For a block named B with Q answered points and a key grid of R rows and C columns it holds:

    - ``B/weights`` (Q, R, C): f(x_i, x_j) / C(x), float32;
    - ``B/points`` (Q, 2): (x, y) asked for, in picture pixels;
    - ``B/cells`` (Q, 2): (row, column) of the block's input;
    - ``B/keys_x`` (Q, C) and ``B/keys_y`` (Q, R): the centres of the keys in picture pixels;
    - ``B/difference``: :func:`row_difference` over a fixed grid of positions.

    A block without an answer has ``B/difference`` alone.

    Args:
        path: the file.
        found: what :meth:`AttentionRecorder.attention` gave.
    """
    arrays = {}
    for block in found:
        arrays[f"{block.name}/difference"] = np.float64(block.difference)
        if block.rows:
            centers = [row.key_centers() for row in block.rows]
            arrays[f"{block.name}/weights"] = np.stack([row.weights for row in block.rows])
            arrays[f"{block.name}/points"] = np.array([row.point for row in block.rows])
            arrays[f"{block.name}/cells"] = np.array([row.cell for row in block.rows])
            arrays[f"{block.name}/keys_x"] = np.stack([x for x, _ in centers])
            arrays[f"{block.name}/keys_y"] = np.stack([y for _, y in centers])
    with open(path, "wb") as file:  # given a name, savez would add a suffix
        np.savez_compressed(file, **arrays)


def _strides(model: nn.Module) -> dict[nn.Module, int]:
    """The pixels of the network input that a cell covers, for every block in a ResNet's stages."""
    strides: dict[nn.Module, int] = {}
    for resnet in model.modules():
        if not isinstance(resnet, ResNet):
            continue
        stride = resnet.stem.stride
        for stage in resnet.stages:
            for member in stage.children():
                if isinstance(member, NonLocalBlock):
                    strides[member] = stride
                else:
                    stride *= member.stride
    return strides


def _rows(
    block: NonLocalBlock,
    x: Tensor,
    points: Sequence[tuple[float, float]],
    area: tuple[float, float, float, float],
    roi: tuple[float, float, float, float] | None = None,
) -> list[AttentionRow]:
    """Ask the block about points of its input x (1, C, H, W), which covers ``area`` of the picture."""
    if not points:
        return []
    cells = _cells(points, area, x.shape[2:])
    weights = block.attention(x, torch.tensor(cells, device=x.device))[0].float().cpu().numpy()
    x0, y0, x1, y1 = area
    shares = []
    for size, keys in zip(x.shape[2:], weights.shape[1:], strict=True):
        # Equal sizes: not pooled, or a single cell. Else a key is two cells, and an odd last one is lost.
        shares.append(1.0 if size == keys else 2 * keys / size)
    keys_area = (x0, y0, x0 + (x1 - x0) * shares[1], y0 + (y1 - y0) * shares[0])
    return [AttentionRow(p, c, w, keys_area, roi) for p, c, w in zip(points, cells, weights, strict=True)]


def _difference(
    block: NonLocalBlock,
    x: Tensor,
    points: Sequence[tuple[float, float]],
    area: tuple[float, float, float, float],
) -> float:
    cells = sorted(set(_cells(points, area, x.shape[2:])))
    if len(cells) < 2:
        return float("nan")
    return row_difference(block.attention(x, torch.tensor(cells, device=x.device))[0].flatten(1))


def _cells(
    points: Sequence[tuple[float, float]], area: tuple[float, float, float, float], size: Sequence[int]
) -> list[tuple[int, int]]:
    """The (row, column) of a map of some size over ``area`` that hold the points."""
    x0, y0, x1, y1 = area
    rows, columns = size
    cells = []
    for x, y in points:
        row = int((y - y0) / max(y1 - y0, 1e-9) * rows)
        column = int((x - x0) / max(x1 - x0, 1e-9) * columns)
        cells.append((min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)))
    return cells


def _grid(box: tuple[float, float, float, float]) -> list[tuple[float, float]]:
    x0, y0, x1, y1 = box
    steps = [(k + 0.5) / _PROBES for k in range(_PROBES)]
    return [(x0 + (x1 - x0) * a, y0 + (y1 - y0) * b) for b in steps for a in steps]


def _holds(box: Sequence[float], point: tuple[float, float]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
