"""Controlled comparisons: arms x seeds trained alike, their statistics, tables and figures."""

from __future__ import annotations

from nonlocal_det.errors import ArmError
from nonlocal_det.experiments.arms import TASKS, Arm, named_arms, parse_seeds
from nonlocal_det.experiments.figures import draw_curves, draw_distance
from nonlocal_det.experiments.outcomes import Cost, Outcome, collect, measure_cost
from nonlocal_det.experiments.runs import Run, check_folder, lock_folder, plan_runs, run_all
from nonlocal_det.experiments.statistics import Difference, Summary, paired_difference, summarize
from nonlocal_det.experiments.tables import Report

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
