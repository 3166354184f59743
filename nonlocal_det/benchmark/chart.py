"""The chart of what a block costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nonlocal_det.benchmark.block import BlockCost
from nonlocal_det.benchmark.detector import DetectorCost
from nonlocal_det.layers import PAIRWISE_FUNCTIONS
from nonlocal_det.media.figure import make_panels

# Told apart by colour-blind readers, too.
_COLORS = ("#0072b2", "#56b4e9", "#e69f00", "#009e73")


def draw_chart(
    path: str | os.PathLike[str], blocks: Sequence[BlockCost], detector: DetectorCost | None, caption: str
) -> None:
    """Draw the costs of blocks beside the matrix form, and those of a detector, into a .png file.

    Forward passes alone are left out. The caption, a line below, says on what and with what it was measured.
    """
    blocks = [cost for cost in blocks if cost.case.backward]
    panels = [*(("time", "memory") if blocks else ()), *(("detector",) if detector else ())]
    figure, axes = make_panels(len(panels), 1 + 4 * len(panels), 3.8, dpi=110)
    for axis, panel in zip(axes, panels, strict=True):
        if panel == "detector":
            _draw_detector(axis, detector)
        else:
            _draw_blocks(axis, blocks, panel)
    if blocks:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=9)
    figure.supxlabel(caption, fontsize=8, color="0.35")
    figure.savefig(path, format="png")


def _draw_blocks(axis: Any, blocks: list[BlockCost], panel: str) -> None:
    """Draw a group of bars for each input, with a bar for each f."""
    by_group: dict[tuple[str, str, str], list[BlockCost]] = {}
    for cost in blocks:
        by_group.setdefault((cost.case.stage, cost.case.input, cost.case.pool), []).append(cost)
    names = [name for name in PAIRWISE_FUNCTIONS if any(c.case.pairwise == name for c in blocks)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        color = _COLORS[PAIRWISE_FUNCTIONS.index(name)]
        for position, group in enumerate(by_group):
            for cost in by_group[group]:
                value = cost.time.median if panel == "time" else cost.memory_ratio
                if cost.case.pairwise != name or value is None:
                    continue
                left = position - 0.4 + (number + 0.5) * width
                axis.bar(left, value, width * 0.92, color=color)
                # Its own ground, as the line at 1 may cross it.
                ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                at = {"textcoords": "offset points", "ha": "center", "fontsize": 6.5}
                axis.annotate(f"{value:.2f}", (left, value), (0, 2), bbox=ground, zorder=4, **at)
        axis.bar(0, 0, color=color, label=name.replace("_", " "))
    axis.axhline(1, color="0.3", linewidth=1, linestyle="--")
    pools = {pool: "no pooling" if pool == "none" else f"pool {pool}" for _, _, pool in by_group}
    labels = [f"{stage}\n{shape}\n{pools[pool]}" for stage, shape, pool in by_group]
    axis.set_xticks(range(len(by_group)), labels, fontsize=8)
    axis.set_xlim(-0.5, len(by_group) - 0.5)
    title = "Time of one block" if panel == "time" else "Extra memory of one block"
    axis.set_title(f"{title}\n(matrix form = 1, forward + backward)", fontsize=9)


def _draw_detector(axis: Any, detector: DetectorCost) -> None:
    """Draw a bar for each cost of the detector, in percent of the baseline's."""
    training, inference = detector.training, detector.inference
    bars = {
        "FLOPs": (detector.flops.total / detector.baseline_flops.total, None),
        "training\ntime": (training.time.median, training.time.interval),
        "inference\ntime": (inference.time.median, inference.time.interval),
        "training\nmemory": (training.memory_ratio, None),
    }
    bars = {name: bar for name, bar in bars.items() if bar[0] is not None}
    for position, (ratio, interval) in enumerate(bars.values()):
        percent = top = 100 * (ratio - 1)
        axis.bar(position, percent, 0.6, color=_COLORS[0])
        if interval:
            low, high = (100 * (end - 1) for end in interval)
            axis.plot([position, position], [low, high], color="0.2", linewidth=1.2)
            top = max(percent, high)
        axis.text(position, max(top, 0), f"{percent:+.1f} %", ha="center", va="bottom", fontsize=8)
    axis.axhline(0, color="0.3", linewidth=1)
    axis.set_xticks(range(len(bars)), list(bars), fontsize=8)
    axis.margins(y=0.15)
    title = "Whole detector with its blocks\n(over the baseline, lines are 95 % intervals)"
    axis.set_title(title, fontsize=9)
