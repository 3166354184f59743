"""Figures of a comparison: training curves (the paper's Figure 4), and accuracy against distance."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from nonlocal_det.errors import counted
from nonlocal_det.experiments.outcomes import Outcome, probes_of, range_text
from nonlocal_det.files import whole_file
from nonlocal_det.media.figure import make_panels

#: Objects in one range of distances, as a probe has counted them, and a figure of theirs.
Row = Mapping[str, Any]
FigureOf = Callable[[Row], float | None]
# Told apart by colour-blind readers, too.
_COLORS = ("0.35", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_DASHES = ("-", "--", ":")
#: Up to so many names of lines stand inside the axes.
_FEW = 4


def draw_curves(
    path: str | os.PathLike[str],
    outcomes: Sequence[Outcome],
    labels: Mapping[str, str],
    arms: Sequence[str] = (),
) -> bool:
    """Draw the total training loss against the iteration: a thin line a run, a thick one for their mean.

    The mean is that of the finished runs, as in the table; a run that ended early has a thin line alone.

    Args:
        path: a .png file, which appears when it is whole.
        outcomes: runs of any arms.
        labels: name of an arm -> its label, of all arms: an arm has the colour of its place here.
        arms: names of those to draw; all by default.

    Returns:
        Whether there was anything to draw.
    """
    logged = {one.arm for one in outcomes if len(one.curve) > 1}
    drawn = [name for name in labels if name in logged and (name in arms or not arms)]
    if not drawn:
        return False
    figure, (axis,) = make_panels(1, 6, 3.6, dpi=120)
    styles = _styles(labels)
    for name in drawn:
        style, runs = styles[name], [one for one in outcomes if one.arm == name and len(one.curve) > 1]
        whole = [dict(run.curve) for run in runs if run.finished]
        for run in runs:
            if not (run.finished and len(whole) == 1):
                axis.plot(*zip(*run.curve, strict=True), **style, linewidth=0.6, alpha=0.35)
        steps = sorted(set.intersection(*map(set, whole))) if whole else []
        mean = [np.mean([run[step] for run in whole]) for step in steps]
        label = f"{labels[name]} ({counted(len(whole), 'seed')})"
        axis.plot(steps, mean, **style, linewidth=1.8, label=label)
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("iteration")
    axis.set_ylabel("training loss")
    _legend([axis], "upper right")
    _save(figure, path)
    return True


def draw_distance(
    path: str | os.PathLike[str], outcomes: Sequence[Outcome], labels: Mapping[str, str]
) -> bool:
    """Draw how often class or side is right, and box AP, against the distance to what tells it.

    A dot is the mean over the seeds of an arm, and the bar through it goes from the lowest seed to the
    highest. Below each range of distances stands the number of objects in it. Path and labels are as above.

    Returns:
        Whether there was anything to draw: only some data sets tell distances.
    """
    probed = {key for outcome in outcomes if outcome.arm in labels for key in outcome.probes}
    key = next((key for key in _DISTANCES if key in probed), None)
    if key is None:
        return False
    distance, panels = _DISTANCES[key]
    rows = probes_of(outcomes, key)
    drawn = [name for name in labels if name in rows]
    bins = {row["low"]: row for name in drawn for run in rows[name] for row in run}
    lows = sorted(bins)
    figure, axes = make_panels(len(panels), 6 if len(panels) == 1 else 9.5, 3.6, dpi=120)
    # Arms stand side by side in each range, so that one does not hide another.
    shifts = np.arange(len(drawn)) - (len(drawn) - 1) / 2
    width = min(0.08, 0.6 / len(drawn))
    if key == "distance":
        axes[0].axhline(50, color="0.6", linewidth=1, linestyle="--", label="chance")
    styles = _styles(labels)
    for name, shift in zip(drawn, shifts, strict=True):
        style, positions = styles[name], np.arange(len(lows)) + width * shift
        label = f"{labels[name]} ({counted(len(rows[name]), 'seed')})"
        for axis, figure_of in zip(axes, panels.values(), strict=True):
            lowest, mean, highest = np.transpose([_spread(rows[name], low, figure_of) for low in lows])
            axis.plot(positions, mean, **style, marker="o", markersize=4.5, linewidth=1.2, label=label)
            axis.vlines(positions, lowest, highest, color=style["color"], linewidth=2.5, alpha=0.45)
    ticks = [f"{range_text(bins[low])}\nn = {bins[low]['objects']}" for low in lows]
    for axis, what in zip(axes, panels, strict=True):
        axis.set_xticks(range(len(lows)), ticks)
        axis.set_xlabel(distance)
        axis.set_ylabel(what)
        axis.set_ylim(0, 104)
    _legend(axes, "best")
    _save(figure, path)
    return True


def _percent_right(row: Row) -> float | None:
    return 100 * row["right"] / row["found"] if row["found"] else None


# Key of a probe by distance -> the name of that distance, then panels: their names and figures. There is no
# chance level for sides: what looks alike to a model it may put in one place, which is not right.
_DISTANCES: dict[str, tuple[str, dict[str, FigureOf]]] = {
    "distance": (
        "distance to the disc (pixels)",
        {"class right (% of the squares found)": _percent_right, "box AP": lambda row: row["AP"]},
    ),
    "sides": ("distance to the head (pixels)", {"sides right (% of the pairs found)": _percent_right}),
}


def _spread(runs: Sequence[Sequence[Row]], low: float, figure_of: FigureOf) -> tuple[float, float, float]:
    """Return the lowest, the mean and the highest figure of the runs in the range that starts at ``low``."""
    values = [figure_of(row) for run in runs for row in run if row["low"] == low]
    found = [value for value in values if value is not None]
    return (min(found), float(np.mean(found)), max(found)) if found else (np.nan, np.nan, np.nan)


def _styles(labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a line style for each arm, by its place."""
    styles = [{"color": color, "linestyle": dash} for dash in _DASHES for color in _COLORS]
    return dict(zip(labels, cycle(styles), strict=False))


def _legend(axes: Sequence[Any], place: str) -> None:
    """Name the lines of the first axes: inside them, or right of the last where there are many."""
    handles, names = axes[0].get_legend_handles_labels()
    if len(names) <= _FEW:
        axes[0].legend(handles, names, frameon=False, fontsize=9, loc=place)
    else:
        axes[0].figure.set_figwidth(axes[0].figure.get_figwidth() + 2.6)
        axes[-1].legend(handles, names, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    with whole_file(path) as part:
        figure.savefig(part, format="png")
