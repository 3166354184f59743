"""Training and evaluation: Detectron2's default trainer, on GPUs and CPUs, checked before it starts."""

from __future__ import annotations

from nonlocal_det.engine.launch import count_processes, find_place, launch_processes
from nonlocal_det.engine.loop import Trainer
from nonlocal_det.engine.task import check_run
from nonlocal_det.errors import INPUT_ERRORS, Preempted

__all__ = [
    "INPUT_ERRORS",
    "Preempted",
    "Trainer",
    "check_run",
    "count_processes",
    "find_place",
    "launch_processes",
]
