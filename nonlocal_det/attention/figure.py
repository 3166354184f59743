"""The picture of a block's attention: arrows to the positions that count most, and a heat map."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from nonlocal_det.attention.recording import AttentionRow, BlockAttention

#: How many of the highest-weighted positions get an arrow, as in Figure 3.
ARROWS = 20

_DPI = 100
_PANEL = 640  # pixels of the longer side of each of the two panels


def draw_attention(image: np.ndarray, found: BlockAttention) -> np.ndarray:
    """Draw the rows of a block, one below the other, each as arrows (left) and as a heat map (right).

    Weights that have a sign are red where positive, blue where negative. A row about an instance shows the
    surroundings of its box.

    Args:
        image: the upright picture, array (H, W, 3), uint8, BGR.
        found: a block with at least one row.

    Returns:
        Array (H', W', 3), uint8, BGR.
    """
    height, width = image.shape[:2]
    views = [_view(row, height, width) for row in found.rows]
    panels = []
    for x0, y0, x1, y1 in views:
        # Neither side under a fifth of the other: a thin picture keeps room for its title.
        scale = _PANEL / max(x1 - x0, y1 - y0)
        panels.append([max(side * scale, _PANEL / 5) for side in (x1 - x0, y1 - y0)])
    margin, title, bar = 14, 34, 96
    panel_width = max(w for w, _ in panels)
    total = 2 * panel_width + bar + 3 * margin, sum(h + title + margin for _, h in panels)
    figure = Figure(figsize=(total[0] / _DPI, total[1] / _DPI), dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)

    def add_axes(left: float, bottom: float, width: float, height: float) -> Axes:
        return figure.add_axes((left / total[0], bottom / total[1], width / total[0], height / total[1]))

    rgb = image[:, :, ::-1]
    gray = np.asarray(Image.fromarray(np.ascontiguousarray(rgb)).convert("L"))
    bottom = total[1]
    for row, view, (_, panel_height) in zip(found.rows, views, panels, strict=True):
        bottom -= title + panel_height
        arrows = add_axes(margin, bottom, panel_width, panel_height)
        heat_map = add_axes(2 * margin + panel_width, bottom, panel_width, panel_height)
        color_bar = add_axes(3 * margin + 2 * panel_width, bottom, 16, panel_height)
        norm, colors = _colors(row)
        _draw_arrows(arrows, rgb, row)
        _draw_heat_map(heat_map, gray, row, norm, colors)
        for ax in (arrows, heat_map):
            ax.plot(*row.point, marker="o", markersize=9, color="white", markeredgecolor="black", zorder=5)
            if row.roi is not None:
                x0, y0, x1, y1 = row.roi
                ax.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="white", lw=1.5))
            ax.set_xlim(view[0], view[2])
            ax.set_ylim(view[3], view[1])
            ax.set_aspect("equal")
            ax.axis("off")
        arrows.set_title(f"{found.short_name}, from {int(row.point[0])},{int(row.point[1])}", fontsize=12)
        heat_map.set_title(f"weights f / C(x), {found.pairwise}", fontsize=12)
        figure.colorbar(ScalarMappable(norm, colors), cax=color_bar).ax.tick_params(labelsize=9)
        bottom -= margin

    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, 2::-1])


def _view(row: AttentionRow, height: int, width: int) -> tuple[float, float, float, float]:
    """Return the part of the picture to show, (x0, y0, x1, y1)."""
    if row.roi is None:
        return 0.0, 0.0, float(width), float(height)
    x0, y0, x1, y1 = row.roi
    margin = 0.15 * max(x1 - x0, y1 - y0)
    return max(0.0, x0 - margin), max(0.0, y0 - margin), min(width, x1 + margin), min(height, y1 + margin)


def _colors(row: AttentionRow) -> tuple[Normalize, Colormap]:
    low, high = float(row.weights.min()), float(row.weights.max())
    if low < 0:
        limit = max(-low, high)
        return TwoSlopeNorm(0.0, -limit, limit), matplotlib.colormaps["RdBu_r"]
    return Normalize(0.0, high or 1.0), matplotlib.colormaps["inferno"]


def _draw_arrows(ax: Axes, rgb: np.ndarray, row: AttentionRow) -> None:
    ax.imshow(rgb, extent=(0, rgb.shape[1], rgb.shape[0], 0), interpolation="bilinear")
    ends = row.strongest(ARROWS, rgb.shape[:2])
    largest = max((abs(weight) for *_, weight in ends), default=1.0)
    for x, y, weight in reversed(ends):  # the strongest on top
        share = abs(weight) / largest
        style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
        style |= {"color": "tab:blue" if weight < 0 else "red"}
        style |= {"alpha": 0.5 + 0.5 * share, "linewidth": 1.0 + 2.0 * share}
        ax.annotate("", xy=(x, y), xytext=row.point, arrowprops=style)


def _draw_heat_map(ax: Axes, gray: np.ndarray, row: AttentionRow, norm: Normalize, colors: Colormap) -> None:
    height, width = gray.shape
    ax.imshow(gray, cmap="gray", vmin=0, vmax=255, extent=(0, width, height, 0), interpolation="bilinear")
    weights = row.weights
    rgba = colors(norm(weights))
    least = 0.1 if weights.min() < 0 else 0.35  # the middle of the signed colours is white
    rgba[..., 3] = least + (0.85 - least) * np.abs(weights) / max(float(np.abs(weights).max()), 1e-30)
    x0, y0, x1, y1 = row.area
    ax.imshow(rgba, extent=(x0, x1, y1, y0), interpolation="bilinear")
