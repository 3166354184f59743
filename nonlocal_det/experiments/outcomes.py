"""What came out of runs, read from their folders, and what an arm costs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from nonlocal_det.benchmark import count_detector_flops
from nonlocal_det.detection.probes import probe
from nonlocal_det.engine.curves import read_metrics
from nonlocal_det.experiments.runs import Run
from nonlocal_det.modeling.build import build_model

__all__ = ["Cost", "Outcome", "collect", "measure_cost"]

_DIVISIBLE = 32


@dataclass
class Outcome:
    """What came out of one run.

    Attributes:
        arm: name of the arm.
        seed: the seed.
        finished: whether it was trained and evaluated to the end.
        error: why not, or what is missing of a finished run: a line; "" where it has not been started or was
            stopped.
        seconds: wall time of training and evaluation, all tries together.
        seconds_per_iteration: median over the run; None where nothing was logged.
        threads: CPU threads that it had.
        at_once: how many runs shared the machine.
        scores: "bbox/AP", ... (0 to 100) of the first test set.
        probes: see :func:`nonlocal_det.detection.probes.probe`.
        curve: pairs of iteration and total loss.
        tries: how often it was started. Seconds of more than one try hold what a try did that was lost, and
            not what one did that was killed with the comparison.
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
    tries: int = 1


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
    try:
        metrics = read_metrics(run.folder / "metrics.json")
    except OSError:
        metrics = {}
    times = metrics.get("time", {}).values()
    outcome = Outcome(
        run.arm.name,
        run.seed,
        run.finished,
        record.error,
        record.seconds,
        statistics.median(times) if times else None,
        record.threads,
        record.at_once,
        tries=record.tries,
    )
    losses = metrics.get("total_loss", {})
    outcome.curve = [(step, loss) for step, loss in losses.items() if math.isfinite(loss)]
    if not (run.finished and cfg.DATASETS.TEST):
        return outcome
    name = cfg.DATASETS.TEST[0]
    prefix = f"{name}/" if len(cfg.DATASETS.TEST) > 1 else ""
    for task in ("bbox", "segm", "keypoints"):
        for metric in ("AP", "AP50", "AP75"):
            scores = metrics.get(f"{prefix}{task}/{metric}", {})
            last = scores[max(scores)] if scores else math.nan
            if math.isfinite(last):  # it is not where the data set has nothing to find
                outcome.scores[f"{task}/{metric}"] = last
    if not outcome.scores:
        outcome.error = "no score in its metrics.json"
    predictions = run.folder / "inference" / prefix / "coco_instances_results.json"
    annotations = MetadataCatalog.get(name).get("json_file", "")
    if predictions.is_file() and Path(annotations).is_file():
        try:
            outcome.probes = probe(Path(annotations), predictions)
        except (OSError, ValueError, LookupError, TypeError):
            outcome.error = f"{predictions} is damaged"
    return outcome


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
