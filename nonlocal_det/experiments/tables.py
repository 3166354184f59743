"""The table of a comparison in Markdown, in the layout of the paper's Tables 5 and 6, and its raw figures."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from nonlocal_det.experiments.arms import Arm
from nonlocal_det.experiments.outcomes import Cost, Outcome, probes_of, range_text
from nonlocal_det.experiments.statistics import Difference, Summary, paired_difference, summarize

#: How the first part of a score is called in heads, where not by its own name, in the order of the columns.
_HEADS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
CLASS = "class right"
HANDS = "hands right"
_BY_DISTANCE = {
    "distance": "class right (%) / box AP, by distance in pixels",
    "sides": "sides right (%), by distance to the head in pixels",
}


def environment() -> dict[str, Any]:
    """Return the machine and the versions that figures depend on."""
    import detectron2
    import numpy
    import torch
    import torchvision

    import nonlocal_det

    return {
        "machine": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "nonlocal_det": nonlocal_det.__version__,
        "detectron2": detectron2.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": numpy.__version__,
    }


def _processor() -> str:
    names = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


@dataclass
class Report:
    """Everything about a comparison."""

    arms: Sequence[Arm]  # in the order of the table
    outcomes: Sequence[Outcome]  # every run that was asked for
    costs: Mapping[str, Cost]  # name of an arm -> what its model costs
    command: str = ""  # the command line that made it

    def values(self, arm: str, column: str) -> dict[int, float]:
        """Return seed -> figure of the finished runs of an arm, for one of :attr:`columns`."""
        return {
            outcome.seed: figures[column]
            for outcome in self.outcomes
            if outcome.arm == arm and outcome.finished and column in (figures := _figures(outcome))
        }

    @property
    def columns(self) -> list[str]:
        """The figures that any run has, in the order of the table."""
        present = sorted({column for outcome in self.outcomes for column in _figures(outcome)})
        kinds = [column.partition("/")[0] for column in present if "/" in column]
        order = [*_HEADS, *kinds, CLASS, HANDS]
        return sorted(present, key=lambda column: order.index(column.partition("/")[0]))

    def summary(self, arm: str, column: str) -> Summary | None:
        """Return mean and standard deviation over the finished runs of an arm."""
        return summarize(self.values(arm, column).values())

    def differences(self, column: str) -> list[tuple[Arm, Arm, Difference]]:
        """Return (arm, the arm that it is compared with, paired difference) for a figure."""
        by_name = {arm.name: arm for arm in self.arms}
        values = {name: self.values(name, column) for name in by_name}
        return [
            (arm, by_name[name], difference)
            for arm in self.arms
            for name in arm.against
            if name in by_name and (difference := paired_difference(values[arm.name], values[name]))
        ]

    def markdown(self) -> str:
        """Return the tables: arms, differences, distance, and every single run."""
        distances = (self._distance_table(key, head) for key, head in _BY_DISTANCE.items())
        parts = (self._arms_table(), self._differences_table(), *distances, self._runs_table())
        text = "\n\n".join(part for part in parts if part)
        system = environment()
        names = ("python", "torch", "detectron2", "nonlocal_det")
        versions = ", ".join(f"{name} {system[name]}" for name in names)
        machine = f"{system['gpu'] or system['processor']}, {system['cores']} CPU cores"
        command = f"\n\n    {self.command}" if self.command else ""
        return f"{text}\n\n{machine}; {versions}.{command}\n"

    def raw(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        arms = []
        for arm in self.arms:
            cost = asdict(self.costs[arm.name]) if arm.name in self.costs else None
            found = {column: self.summary(arm.name, column) for column in self.columns}
            summaries = {column: asdict(summary) for column, summary in found.items() if summary}
            arms.append({**asdict(arm), "cost": cost, "summary": summaries})
        return {
            "command": self.command,
            "environment": environment(),
            "arms": arms,
            "differences": [
                {"figure": column, "arm": arm.name, "against": other.name, **asdict(difference)}
                for column in self.columns
                for arm, other, difference in self.differences(column)
            ],
            "runs": [asdict(outcome) for outcome in self.outcomes],
        }

    def _arms_table(self) -> str:
        columns = self.columns
        heads = ["", *map(_head, columns), "runs", "seconds", "params (M)", "GFLOPs"]
        rows = []
        for arm in self.arms:
            mine = [outcome for outcome in self.outcomes if outcome.arm == arm.name]
            done = [outcome for outcome in mine if outcome.finished]
            seconds = summarize(outcome.seconds for outcome in done if outcome.tries == 1)
            cost = self.costs.get(arm.name)
            rows.append(
                [
                    arm.label,
                    *(_plus_minus(self.summary(arm.name, column), len(done)) for column in columns),
                    f"{len(done)}" if len(done) == len(mine) else f"{len(done)} of {len(mine)}",
                    f"{seconds.mean:.0f}" if seconds else "-",
                    f"{cost.parameters / 1e6:.2f}" if cost else "-",
                    f"{cost.flops / 1e9:.2f}" if cost and cost.flops else "-",
                ]
            )
        sizes = {f"{cost.height}x{cost.width}" for cost in self.costs.values()}
        size = f"one image of {sizes.pop()}" if len(sizes) == 1 else "one image of an arm's test size"
        note = (
            "Mean ± standard deviation over seeds. Seconds are wall time of training and evaluation of one "
            f"run, of those that took one try; GFLOPs are multiply-adds of {size} with 1,000 proposals and "
            "100 detections."
        )
        if {CLASS, HANDS} & set(columns):
            note += " Classes, hands and sides are counted on what is found at an IoU above 0.5."
        return f"{_table(rows, heads)}\n\n{note}"

    def _differences_table(self) -> str:
        columns = [column for column in self.columns if not column.endswith(("AP50", "AP75"))]
        found: dict[tuple[str, str], dict[str, Difference]] = {}
        labels = {arm.name: arm.label for arm in self.arms}
        for column in columns:
            for arm, other, difference in self.differences(column):
                found.setdefault((arm.name, other.name), {})[column] = difference
        if not found:
            return ""
        rows = []
        for (one, two), by_column in found.items():
            pairs = max(len(difference.seeds) for difference in by_column.values())
            cells = [_interval(by_column.get(column), pairs) for column in columns]
            rows.append([f"{labels[one]} - {labels[two]}", *cells, pairs])
        note = "Paired differences of runs with the same seed: mean [95 % confidence interval, Student's t]."
        return f"{_table(rows, ['', *map(_head, columns), 'pairs'])}\n\n{note}"

    def _distance_table(self, key: str, head: str) -> str:
        probes = probes_of(self.outcomes, key)
        bins = {row["low"]: range_text(row) for runs in probes.values() for run in runs for row in run}
        rows = []
        for arm in self.arms:
            if arm.name not in probes:
                continue
            cells = []
            for low in sorted(bins):
                found = [row for run in probes[arm.name] for row in run if row["low"] == low]
                figures = [summarize(100 * row["right"] / row["found"] for row in found if row["found"])]
                if any("AP" in row for row in found):
                    figures.append(summarize(row["AP"] for row in found if row["AP"] is not None))
                cells.append(" / ".join(f"{one.mean:.0f}" if one else "-" for one in figures))
            rows.append([arm.label, *cells])
        return _table(rows, [head, *(bins[low] for low in sorted(bins))]) if bins else ""

    def _runs_table(self) -> str:
        columns = self.columns
        labels = {arm.name: arm.label for arm in self.arms}
        rows = []
        for outcome in self.outcomes:
            figures = _figures(outcome)
            cells = (f"{figures[column]:.1f}" if column in figures else "-" for column in columns)
            state = (outcome.error or ("" if outcome.finished else "not finished")).replace("|", "\\|")
            row = [labels[outcome.arm], outcome.seed, *cells, f"{outcome.seconds:.0f}", outcome.tries, state]
            rows.append(row)
        heads = ["every run", "seed", *map(_head, columns), "seconds", "tries", "failure"]
        # Nothing to tell: no run that was tried again, or none that failed.
        dull = {"tries": all(row[-2] <= 1 for row in rows), "failure": not any(row[-1] for row in rows)}
        kept = [number for number, head in enumerate(heads) if not dull.get(head)]
        return _table([[row[number] for number in kept] for row in rows], [heads[number] for number in kept])


def _figures(outcome: Outcome) -> dict[str, float]:
    """Return the scores of a run with the percentages of its probes, of the objects that it found."""
    figures = dict(outcome.scores)
    hands = outcome.probes.get("left_hands")
    for name, rows in ((CLASS, outcome.probes.get("distance", [])), (HANDS, [hands] if hands else [])):
        if found := sum(row["found"] for row in rows):
            figures[name] = 100 * sum(row["right"] for row in rows) / found
    return figures


def _head(column: str) -> str:
    kind, _, metric = column.partition("/")
    return f"{_HEADS.get(kind, kind)} {metric}" if metric else f"{column} (%)"


def _plus_minus(summary: Summary | None, runs: int) -> str:
    """Write mean and standard deviation, with the number of values where it is not that of the runs."""
    if summary is None:
        return "-"
    text = f"{summary.mean:.1f}" + (f" ± {summary.sd:.1f}" if summary.sd is not None else "")
    return text if summary.count == runs else f"{text} (n = {summary.count})"


def _interval(difference: Difference | None, pairs: int) -> str:
    """Write a difference and its interval, with the number of pairs where it is not ``pairs``."""
    if difference is None:
        return "-"
    text = f"{difference.mean:+.1f}"
    if difference.low is not None:
        text += f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    return text if len(difference.seeds) == pairs else f"{text} (n = {len(difference.seeds)})"


def _table(rows: Sequence[Sequence[Any]], heads: Sequence[str]) -> str:
    return tabulate(rows, heads, "pipe", disable_numparse=True)
