"""Controlled comparisons: arms x seeds trained alike, their statistics, tables and figures."""

from __future__ import annotations

from nonlocal_det.comparison.arms import TASKS, Arm, ArmError, named_arms, parse_seeds
from nonlocal_det.comparison.collect import Cost, Outcome, collect, measure_cost
from nonlocal_det.comparison.figures import draw_curves, draw_distance
from nonlocal_det.comparison.report import Report
from nonlocal_det.comparison.runs import Run, check_folder, lock_folder, plan_runs, run_all
from nonlocal_det.comparison.statistics import Difference, Summary, paired_difference, summarize

__all__ = [
    "TASKS",
    "Arm",
    "ArmError",
    "Cost",
    "Difference",
    "Outcome",
    "Report",
    "Run",
    "Summary",
    "check_folder",
    "collect",
    "draw_curves",
    "draw_distance",
    "lock_folder",
    "measure_cost",
    "named_arms",
    "paired_difference",
    "parse_seeds",
    "plan_runs",
    "run_all",
    "summarize",
]
