"""Figures of a comparison: training curves (the paper's Figure 4), and accuracy against distance."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nonlocal_det.comparison.collect import Outcome

__all__ = ["draw_curves", "draw_distance"]

# Told apart by colour-blind readers, too.
_COLORS = ("0.35", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def draw_curves(
    path: str | os.PathLike[str], outcomes: Sequence[Outcome], labels: Mapping[str, str], caption: str = ""
) -> bool:
    """Draw the total training loss against the iteration: a thin line a run, a thick one for the mean.

    Args:
        path: a .png file.
        outcomes: runs of the arms to draw.
        labels: name of an arm -> its label, in the order of the legend.
        caption: a line below.

    Returns:
        Whether there was anything to draw.
    """
    curves: dict[str, list[dict[int, float]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.arm in labels and len(outcome.curve) > 1:
            curves[outcome.arm].append(dict(outcome.curve))
    if not curves:
        return False
    figure, axis = _figure()
    for color, (arm, label) in zip(_cycle(), labels.items(), strict=False):
        runs = curves.get(arm)
        if not runs:
            continue
        for run in runs:
            axis.plot(list(run), list(run.values()), color=color, linewidth=0.6, alpha=0.35)
        steps = sorted(set.intersection(*map(set, runs)))
        mean = [np.mean([run[step] for run in runs]) for step in steps]
        axis.plot(steps, mean, color=color, linewidth=1.8, label=f"{label} ({_seeds(len(runs))})")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("iteration")
    axis.set_ylabel("training loss")
    axis.legend(frameon=False, fontsize=9)
    _save(figure, path, caption)
    return True


def draw_distance(
    path: str | os.PathLike[str], outcomes: Sequence[Outcome], labels: Mapping[str, str], caption: str = ""
) -> bool:
    """Draw how often the class is right, and box AP, against the distance to what tells the class.

    Objects of all seeds are counted together; the bars are 95 % intervals over seeds, as in the table.

    Args:
        path: a .png file.
        outcomes: runs of the arms to draw.
        labels: name of an arm -> its label, in the order of the legend.
        caption: a line below.

    Returns:
        Whether there was anything to draw: only some data sets record distances.
    """
    drawn = [outcome for outcome in outcomes if "distance" in outcome.probes and outcome.arm in labels]
    if not drawn:
        return False
    figure, axes = _figure(2)
    bins = sorted({(row["low"], row["high"]) for one in drawn for row in one.probes["distance"]}, key=str)
    bins.sort(key=lambda ends: ends[0])
    for color, (arm, label) in zip(_cycle(), labels.items(), strict=False):
        runs = [one.probes["distance"] for one in drawn if one.arm == arm]
        if not runs:
            continue
        for axis, value in ((axes[0], _percent_right), (axes[1], lambda row: row["AP"])):
            per_bin = [[value(row) for run in runs for row in run if row["low"] == low] for low, _ in bins]
            per_bin = [[v for v in values if v is not None] for values in per_bin]
            mean = [np.mean(values) if values else np.nan for values in per_bin]
            axis.plot(range(len(bins)), mean, color=color, marker="o", label=f"{label} ({_seeds(len(runs))})")
            for position, values in enumerate(per_bin):
                axis.plot([position] * len(values), values, ".", color=color, markersize=3, alpha=0.5)
    names = [f"{low:.0f}+" if high is None else f"{low:.0f}-{high:.0f}" for low, high in bins]
    for axis in axes:
        axis.set_xticks(range(len(bins)), names)
        axis.set_xlabel("distance to the disc (pixels)")
        axis.set_ylim(0, 103)
    axes[0].axhline(50, color="0.6", linewidth=1, linestyle="--")
    axes[0].text(0, 47, "chance", color="0.45", fontsize=8, va="top")
    axes[0].set_ylabel("class right (% of the squares found)")
    axes[1].set_ylabel("box AP")
    axes[0].legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 0.02))
    _save(figure, path, caption)
    return True


def _percent_right(row: Mapping[str, Any]) -> float | None:
    return 100 * row["right"] / row["found"] if row["found"] else None


def _cycle() -> list[str]:
    return list(_COLORS) * 4


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it would choose a backend
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * columns + (columns == 1), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: str | os.PathLike[str], caption: str) -> None:
    if caption:
        figure.supxlabel(caption, fontsize=7, color="0.35")
    figure.savefig(path, format="png")
