"""Training and evaluation: Detectron2's default trainer, on GPUs and CPUs, checked before it starts."""

from __future__ import annotations

from nonlocal_det.engine.checks import check_run
from nonlocal_det.engine.launching import INPUT_ERRORS, count_processes, find_place, launch_processes
from nonlocal_det.engine.preemption import Preempted
from nonlocal_det.engine.trainer import Trainer

__all__ = [
    "INPUT_ERRORS",
    "Preempted",
    "Trainer",
    "check_run",
    "count_processes",
    "find_place",
    "launch_processes",
]
