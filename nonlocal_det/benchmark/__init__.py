"""What blocks cost: time, memory and operations, of a block alone and of whole detectors."""

from __future__ import annotations

from nonlocal_det.benchmark.block import (
    BlockCase,
    BlockCost,
    block_cases,
    growth_cases,
    measure_block,
    measure_growth,
)
from nonlocal_det.benchmark.chart import draw_chart
from nonlocal_det.benchmark.detector import DetectorCost, StepCost, compare_detectors, without_blocks
from nonlocal_det.benchmark.plain import plain_block
from nonlocal_det.benchmark.ratio import Ratio, compare
from nonlocal_det.detection.cost import count_detector_flops
from nonlocal_det.errors import MeasurementError
from nonlocal_det.modeling.flops import Flops, count_flops

__all__ = [
    "BlockCase",
    "BlockCost",
    "DetectorCost",
    "Flops",
    "MeasurementError",
    "Ratio",
    "StepCost",
    "block_cases",
    "compare",
    "compare_detectors",
    "count_detector_flops",
    "count_flops",
    "draw_chart",
    "growth_cases",
    "measure_block",
    "measure_growth",
    "plain_block",
    "without_blocks",
]
