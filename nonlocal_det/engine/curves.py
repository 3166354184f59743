"""The curves of a run, drawn from its metrics.json: losses, and AP."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from itertools import cycle
from statistics import fmean, median
from typing import Any

from detectron2.utils.file_io import PathManager

from nonlocal_det.media.figure import make_figure, tidy

#: Values of a metric by iteration, in its order.
Series = dict[int, float]

# Told apart by colour-blind readers, too.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: A line of training has about this many points.
_POINTS = 150
_VALIDATION = re.compile(r"(?:(?P<dataset>.+)/)?val/(?P<loss>.+)")
_AP = re.compile(r"(?P<name>(?:.+/)?(?:bbox|segm|keypoints)(?:_TTA)?)/AP")


def read_metrics(path: str | os.PathLike[str]) -> dict[str, Series]:
    """Return the values of each metric by iteration, in ascending order; they may be NaN or infinite.

    The run may have been stopped and resumed any number of times. Where it went back, as one that was killed
    does, what had been written of later iterations is left out. Lines that are not whole are left out too,
    but not a whole one behind the beginning of another.

    Raises:
        OSError: the file cannot be read.
    """
    rows: dict[int, dict[str, float]] = {}
    last = -1
    for row in _rows(path):
        iteration = row.pop("iteration")
        if "total_loss" in row:
            if iteration <= last:
                rows = {number: values for number, values in rows.items() if number < iteration}
            last = iteration
        rows.setdefault(iteration, {}).update(row)
    metrics: dict[str, Series] = {}
    for iteration in sorted(rows):
        for name, value in rows[iteration].items():
            metrics.setdefault(name, {})[iteration] = value
    return metrics


def _rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    with PathManager.open(os.fspath(path), "r", encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # the process was killed while it wrote, and the next one wrote behind it
                try:
                    row = json.loads(line[line.rfind("{") :])
                except ValueError:
                    continue
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                yield {name: value for name, value in row.items() if isinstance(value, (int, float))}


def draw_curves(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Draw the losses, validation losses and AP in ``metrics.json`` (source) into a .png file (target).

    Raises:
        OSError: one of them cannot be read or written.
    """
    metrics: dict[str, Series] = {}
    validation: dict[str, dict[str, Series]] = {}
    scores: dict[str, Series] = {}
    for name, every in read_metrics(source).items():
        metrics[name] = series = {k: value for k, value in every.items() if math.isfinite(value)}
        if found := _VALIDATION.fullmatch(name):
            validation.setdefault(found["loss"], {})[found["dataset"] or ""] = series
        elif found := _AP.fullmatch(name):
            scores[found["name"]] = series
    single = [name for name in metrics if name.startswith("loss")]

    rows = (1 if len(single) < 4 else 2) if single else 0
    heights = [4, 2.4 * rows] if rows else [4]
    figure = make_figure(11, sum(heights), dpi=110)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    left, right = parts[0, 0].subplots(1, 2, sharex=True)
    _draw_losses(left, "total_loss", metrics, validation)
    if left.lines:
        left.legend(frameon=False, fontsize=8)
    left.set_title("total loss", fontsize=10)
    _draw_scores(right, scores)
    if rows:
        axes = parts[1, 0].subplots(rows, -(-len(single) // rows), squeeze=False).ravel()
        for name, axis in zip(single, axes, strict=False):
            _draw_losses(axis, name, metrics, validation)
            axis.set_title(name, fontsize=9)
        for axis in axes[len(single) :]:
            axis.remove()
    tidy(figure.axes, color="0.92")
    for axis in figure.axes:
        axis.tick_params(labelsize=8)
    figure.supxlabel("iteration", fontsize=9)
    with PathManager.open(os.fspath(target), "wb") as file:
        figure.savefig(file, format="png")


def _draw_losses(
    axis: Any, name: str, metrics: dict[str, Series], validation: dict[str, dict[str, Series]]
) -> None:
    """Draw one loss: a line for training, and one with a point for each evaluation of a data set."""
    curves = {"training (median of 20 iterations)": metrics.get(name, {})}
    for dataset, series in validation.get(name, {}).items():
        curves[f"validation on {dataset}" if dataset else "validation"] = series
    for (label, series), color in zip(curves.items(), cycle(_COLORS)):
        x, y = list(series), list(series.values())
        if color == _COLORS[0] and len(x) > 2 * _POINTS:  # else the line would be a band
            axis.plot(x, y, color=color, alpha=0.3, lw=0.5)
            x, y = (_thinned(values) for values in (x, y))
        if x:
            marker = "" if color == _COLORS[0] and len(x) > 1 else "."
            axis.plot(x, y, marker=marker, color=color, label=label, lw=1.2)
    values = [value for series in curves.values() for value in series.values()]
    if values and min(values) > 0 and max(values) > 20 * median(values):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter("")


def _thinned(values: list[float]) -> list[float]:
    """Return the means of equal parts."""
    step = -(-len(values) // _POINTS)
    return [fmean(values[i : i + step]) for i in range(0, len(values), step)]


def _draw_scores(axis: Any, scores: dict[str, Series]) -> None:
    """Draw AP by task, and say which is the best."""
    for (name, series), color in zip(scores.items(), cycle(_COLORS)):
        if not series:
            continue
        best = max(series, key=series.__getitem__)
        label = f"{name}: best {series[best]:.1f} at {best}"
        axis.plot(list(series), list(series.values()), marker=".", color=color, label=label, lw=1.2)
        axis.plot([best], [series[best]], marker="*", markersize=11, color=color)
    if any(scores.values()):
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.text(0.5, 0.5, "no score", ha="center", transform=axis.transAxes, color="0.4")
    axis.set_title("AP", fontsize=10)
