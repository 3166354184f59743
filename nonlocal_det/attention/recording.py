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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from detectron2.modeling import ResNet
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nonlocal_det.files import whole_file
from nonlocal_det.layers import NonLocalBlock

Point = tuple[float, float]
Box = tuple[float, float, float, float]

# Queries on each axis, evenly spaced, for the difference between rows.
_PROBES = 8


@dataclass(frozen=True)
class AttentionRow:
    """What one position of one block attends to; boxes are (x0, y0, x1, y1) in picture pixels.

    Attributes:
        point: the point (x, y) asked for, in picture pixels.
        cell: (row, column) of the block's input that holds the point.
        weights: f(x_i, x_j) / C(x) over the key grid, array (rows, columns), float32. The two Gaussian
            functions sum to 1; "dot_product" may be negative.
        area: the box that the key grid covers. It may reach beyond the picture (the padding) or stop short
            of its end (an odd last row or column is not pooled).
        roi: the box of the instance whose features the block got; None for one that sees the whole picture.
    """

    point: Point
    cell: tuple[int, int]
    weights: np.ndarray
    area: Box
    roi: Box | None = None

    def key_centers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the centres of the key cells in picture pixels: x (columns,) and y (rows,)."""
        rows, columns = self.weights.shape
        x0, y0, x1, y1 = self.area
        x = x0 + (np.arange(columns) + 0.5) * ((x1 - x0) / columns)
        return x, y0 + (np.arange(rows) + 0.5) * ((y1 - y0) / rows)

    def strongest(self, count: int, picture_size: tuple[int, int]) -> list[tuple[float, float, float]]:
        """Return up to ``count`` positions with the highest weights as (x, y, weight), the highest first.

        Keys beyond ``picture_size`` (height, width) are left out, and weights of exactly 0: the ReLU of Eq. 5
        has switched those keys off.
        """
        x, y = self.key_centers()
        inside = (y[:, None] < picture_size[0]) & (x[None, :] < picture_size[1]) & (self.weights != 0)
        rows, columns = np.nonzero(inside)
        weights = self.weights[rows, columns]
        order = np.argsort(-weights, kind="stable")[:count]
        return [(float(x[columns[k]]), float(y[rows[k]]), float(weights[k])) for k in order]


@dataclass(frozen=True)
class BlockAttention:
    """The rows of one block for the points asked for."""

    name: str  # as in named_modules
    pairwise: str  # its f
    rows: list[AttentionRow] = field(default_factory=list)  # for every point that the block can answer
    notes: list[str] = field(default_factory=list)  # a line for every point that it cannot
    # row_difference over a fixed grid of positions, whatever was asked for; NaN where the block got no input
    # or a single position.
    difference: float = float("nan")

    @property
    def short_name(self) -> str:
        """The last parts of the name: ``res4.non_local_5``, ``keypoint_head.non_local_2``."""
        return ".".join(self.name.split(".")[-2:])


class Frame(NamedTuple):
    """The sizes (height, width) of the upright picture, and of the resized one before its padding."""

    picture: tuple[int, int]
    network: tuple[int, int]


@dataclass(frozen=True)
class Region:
    """A part of a picture that a block saw."""

    sample: int  # of the block's input
    area: Box  # that this input covers, in picture pixels
    roi: Box | None = None  # the same where the block saw only a part of the picture


@dataclass(frozen=True)
class Sight:
    """What a block saw of some points."""

    seen: list[tuple[Region, Sequence[Point]]]  # the points to ask about in each region
    probed: Region | None  # where BlockAttention.difference is measured; None if the block saw nothing
    notes: list[str] = field(default_factory=list)  # a line for every point that it did not see


class Place(ABC):
    """Where in a model a block stands: what it knows of the picture."""

    def watch(self) -> list[RemovableHandle]:
        """Register hooks that note during an inference what :meth:`look` needs; return their handles."""
        return []

    @abstractmethod
    def look(self, points: Sequence[Point], frame: Frame, size: Sequence[int]) -> Sight:
        """Find points (x, y) in what the block saw; ``size`` is its input's, (rows, columns), or empty."""


class _StagePlace(Place):
    """A place in a stage, which sees the whole picture, with cells of some stride."""

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def look(self, points: Sequence[Point], frame: Frame, size: Sequence[int]) -> Sight:
        down, across = (self.stride * a / b for a, b in zip(frame.picture, frame.network, strict=True))
        region = Region(0, (0.0, 0.0, size[1] * across, size[0] * down))
        return Sight([(region, points)], region)


class AttentionRecorder:
    """Keeps what the non-local blocks of a model get during an inference, and asks them about it.

    Weights are computed afterwards, by :meth:`NonLocalBlock.attention`, for the positions asked for alone.
    Inside the ``with`` block run the model in eval mode, on one picture.

    Args:
        model: a model with blocks in a ResNet's stages.
        places: the places of other blocks, by the blocks' names.

    Raises:
        ValueError: there is no such block.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, Place] | None = None) -> None:
        self._blocks = {n: m for n, m in model.named_modules() if isinstance(m, NonLocalBlock)}
        strides = _strides(model)
        known = {n: _StagePlace(strides[m]) for n, m in self._blocks.items() if m in strides} | (places or {})
        self._places = {name: known[name] for name in self._blocks if name in known}
        if not self._places:
            raise ValueError(
                "the model has no non-local block to draw; set MODEL.NONLOCAL.RES4 [-1] or use a config "
                "whose name has _nl"
            )
        self._inputs: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> AttentionRecorder:
        self._inputs.clear()
        for name in self._places:
            hook = partial(self._keep_input, name)
            self._handles.append(self._blocks[name].register_forward_pre_hook(hook))
        for place in dict.fromkeys(self._places.values()):  # blocks may share one
            self._handles += place.watch()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def attention(
        self, points: Sequence[Point], picture_size: tuple[int, int], network_size: tuple[int, int]
    ) -> list[BlockAttention]:
        """Compute the rows of every block, in the order of the model, for some points.

        Args:
            points: (x, y) in pixels of the upright picture.
            picture_size: (height, width) of that picture.
            network_size: (height, width) of the resized picture before its padding.

        Raises:
            ValueError: a point is outside the picture.
        """
        height, width = picture_size
        for x, y in points:
            if not (0 <= x < width and 0 <= y < height):
                size = f"{width} x {height} (width x height)"
                raise ValueError(f"the point {x:g},{y:g} is outside the picture of {size}")
        return [self._ask(name, points, Frame(picture_size, network_size)) for name in self._places]

    def _keep_input(self, name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._inputs[name] = args[0].detach()

    def _ask(self, name: str, points: Sequence[Point], frame: Frame) -> BlockAttention:
        block, x = self._blocks[name], self._inputs.get(name)
        sight = self._places[name].look(points, frame, () if x is None else x.shape[2:])
        rows = [row for region, seen in sight.seen for row in _rows(block, x, seen, region)]
        difference = float("nan")
        if sight.probed is not None:
            probes = _grid(sight.probed.roi or (0.0, 0.0, float(frame.picture[1]), float(frame.picture[0])))
            difference = _difference(block, x, probes, sight.probed)
        return BlockAttention(name, block.pairwise, rows, sight.notes, difference)


def row_difference(rows: Tensor) -> float:
    """Return how much rows of weights differ: the mean over all pairs of |a - b|_1 / (|a|_1 + |b|_1).

    It is in [0, 1]: 0 means that all positions attend alike (the block adds the same vector everywhere), 1
    that no two rows share a key, or are opposite. For the two Gaussian functions it is the mean total
    variation distance: the share of its weight that a row puts where another does not.

    Args:
        rows: weights (Q, M), Q at least 2. A pair of rows that are both zero counts as 0.
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
            x, y = zip(*(row.key_centers() for row in block.rows), strict=True)
            arrays[f"{block.name}/weights"] = np.stack([row.weights for row in block.rows])
            arrays[f"{block.name}/points"] = np.array([row.point for row in block.rows])
            arrays[f"{block.name}/cells"] = np.array([row.cell for row in block.rows])
            arrays[f"{block.name}/keys_x"], arrays[f"{block.name}/keys_y"] = np.stack(x), np.stack(y)
    with whole_file(path) as partial_path, open(partial_path, "wb") as file:  # a name would get a suffix
        np.savez_compressed(file, **arrays)


def _strides(model: nn.Module) -> dict[nn.Module, int]:
    """Return the stride of every block in a ResNet's stages."""
    strides: dict[nn.Module, int] = {}
    for resnet in [module for module in model.modules() if isinstance(module, ResNet)]:
        stride = resnet.stem.stride
        for stage in resnet.stages:
            for member in stage.children():
                if isinstance(member, NonLocalBlock):
                    strides[member] = stride
                else:
                    stride *= member.stride
    return strides


def _rows(block: NonLocalBlock, x: Tensor, points: Sequence[Point], region: Region) -> list[AttentionRow]:
    """Ask the block about points of a region of its input x (B, C, H, W)."""
    if not points:
        return []
    cells = _cells(points, region.area, x.shape[2:])
    weights = _weights(block, x, cells, region).float().cpu().numpy()
    x0, y0, x1, y1 = region.area
    # Equal sizes: not pooled, or a single cell. Else a key is two cells, and an odd last one is lost.
    sizes = zip(x.shape[2:], weights.shape[1:], strict=True)
    down, across = (1.0 if size == keys else 2 * keys / size for size, keys in sizes)
    area = (x0, y0, x0 + (x1 - x0) * across, y0 + (y1 - y0) * down)
    return [AttentionRow(p, c, w, area, region.roi) for p, c, w in zip(points, cells, weights, strict=True)]


def _difference(block: NonLocalBlock, x: Tensor, points: Sequence[Point], region: Region) -> float:
    cells = sorted(set(_cells(points, region.area, x.shape[2:])))
    if len(cells) < 2:
        return float("nan")
    return row_difference(_weights(block, x, cells, region).flatten(1))


def _weights(block: NonLocalBlock, x: Tensor, cells: Sequence[tuple[int, int]], region: Region) -> Tensor:
    sample = x[region.sample : region.sample + 1]
    return block.attention(sample, torch.tensor(cells, device=x.device))[0]


def _cells(points: Sequence[Point], area: Box, size: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (row, column) of a map of some size over ``area`` that hold the points."""
    x0, y0, x1, y1 = area
    rows, columns = size
    cells = []
    for x, y in points:
        row = int((y - y0) / max(y1 - y0, 1e-9) * rows)
        column = int((x - x0) / max(x1 - x0, 1e-9) * columns)
        cells.append((min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)))
    return cells


def _grid(box: Box) -> list[Point]:
    x0, y0, x1, y1 = box
    steps = [(k + 0.5) / _PROBES for k in range(_PROBES)]
    return [(x0 + (x1 - x0) * a, y0 + (y1 - y0) * b) for b in steps for a in steps]
