"""The look that all figures with axes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def make_figure(width: float, height: float, dpi: int) -> Any:
    """Return an empty figure, which saves without a backend's being chosen for the process; in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def make_panels(columns: int, width: float, height: float, dpi: int) -> tuple[Any, Any]:
    """Return a figure and its axes side by side, tidied with lines at the ticks of y."""
    figure = make_figure(width, height, dpi)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    tidy(axes, axis="y", color="0.9")
    return figure, axes


def tidy(axes: Iterable[Any], **grid: str) -> None:
    """Take the frame off axes but for left and bottom, and put grid lines behind what is drawn."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(**grid)
        axis.set_axisbelow(True)
