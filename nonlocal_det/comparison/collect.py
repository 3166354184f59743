"""What came out of runs, read from their folders, and what an arm costs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.modeling import build_model

from nonlocal_det.benchmark import count_detector_flops
from nonlocal_det.comparison.probes import probe
from nonlocal_det.comparison.runs import Run

__all__ = ["Cost", "Outcome", "collect", "measure_cost"]

_DIVISIBLE = 32


@dataclass
class Outcome:
    """What came out of one run.

    Attributes:
        arm: name of the arm.
        seed: the seed.
        finished: whether it was trained and evaluated to the end.
        error: why not: a line; "" where it has not been started or was stopped.
        seconds: wall time of training and evaluation.
        seconds_per_iteration: median over the run; None where nothing was logged.
        threads: CPU threads that it had.
        at_once: how many runs shared the machine.
        scores: "bbox/AP", ... (0 to 100) of the first test set.
        probes: see :func:`nonlocal_det.comparison.probes.probe`.
        curve: pairs of iteration and total loss.
    """

    arm: str
    seed: int
    finished: bool
    error: str
    seconds: float
    seconds_per_iteration: float | None
    threads: int
    at_once: int
    scores: dict[str, float] = field(default_factory=dict)
    probes: dict[str, Any] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Attributes:
        parameters: how many.
        flops: multiply-adds of one image, with 1,000 proposals and 100 detections; None where they cannot be
            counted.
        height: of that image.
        width: of that image.
        uncounted: operators that no counter knows.
    """

    parameters: int
    flops: int | None
    height: int
    width: int
    uncounted: tuple[str, ...] = ()


def collect(run: Run, cfg: CfgNode) -> Outcome:
    """Read the outcome of a run.

    Args:
        run: the run, finished or not.
        cfg: its config.
    """
    record = run.record()
    lines = _metrics(run.folder / "metrics.json")
    times = [line["time"] for line in lines if "time" in line]
    outcome = Outcome(
        run.arm.name,
        run.seed,
        run.finished,
        record.error,
        record.seconds,
        statistics.median(times) if times else None,
        record.threads,
        record.at_once,
    )
    # A resumed run logs again what it had not saved; the later line counts.
    curve = {line["iteration"]: line["total_loss"] for line in lines if "total_loss" in line}
    outcome.curve = sorted((step, loss) for step, loss in curve.items() if math.isfinite(loss))
    if not (run.finished and cfg.DATASETS.TEST):
        return outcome
    name = cfg.DATASETS.TEST[0]
    prefix = f"{name}/" if len(cfg.DATASETS.TEST) > 1 else ""
    for line in lines:
        for key, value in line.items():
            task, _, metric = key.removeprefix(prefix).partition("/")
            known = key.startswith(prefix) and task in ("bbox", "segm", "keypoints") and metric in _METRICS
            if known and math.isfinite(value):  # it is not where the data set has nothing to find
                outcome.scores[f"{task}/{metric}"] = value
    predictions = run.folder / "inference" / prefix / "coco_instances_results.json"
    annotations = MetadataCatalog.get(name).get("json_file", "")
    if predictions.is_file() and Path(annotations).is_file():
        outcome.probes = probe(Path(annotations), predictions)
    return outcome


_METRICS = ("AP", "AP50", "AP75")


def _metrics(path: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a metrics.json; one that a killed run has left half written is passed over."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def measure_cost(cfg: CfgNode) -> Cost:
    """Count parameters and FLOPs of a model at its test size, MIN_SIZE_TEST x MAX_SIZE_TEST.

    Args:
        cfg: its config. Both sides are rounded up to multiples of 32.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sides = (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    height, width = (math.ceil(side / _DIVISIBLE) * _DIVISIBLE for side in sides)
    with torch.no_grad():
        flops = count_detector_flops(model, height, width)
    return Cost(parameters, flops.total, height, width, tuple(sorted(flops.uncounted)))
