"""What came out of runs, read from their folders, and what an arm costs."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.config import CfgNode

from nonlocal_det.engine.curves import read_metrics
from nonlocal_det.engine.task import find_task
from nonlocal_det.errors import DatasetError, one_line
from nonlocal_det.experiments.runs import Run
from nonlocal_det.modeling.build import build_model

#: A score such as "bbox/AP" may have others beside it, at one IoU each: "bbox/AP50".
_BESIDE = ("", "50", "75")


@dataclass
class Outcome:
    """What came out of one run."""

    arm: str
    seed: int
    finished: bool  # whether it was trained and evaluated to the end
    #: why not, or what is missing of a finished run: a line; "" where it has not been started or was stopped
    error: str
    seconds: float  # wall time of training and evaluation, all tries together
    seconds_per_iteration: float | None  # median over the run; None where nothing was logged
    threads: int  # CPU threads that it had
    at_once: int  # how many runs shared the machine
    #: "bbox/AP", ... (0 to 100) of the first test set, as the task names them.
    scores: dict[str, float] = field(default_factory=dict)
    probes: dict[str, Any] = field(default_factory=dict)  # see :meth:`nonlocal_det.engine.task.Task.probe`
    curve: list[tuple[int, float]] = field(default_factory=list)  # pairs of iteration and total loss
    #: how often it was started. Seconds of more than one try hold what a try did that was lost, and not what
    #: one did that was killed with the comparison.
    tries: int = 1


@dataclass(frozen=True)
class Cost:
    """What a model costs."""

    parameters: int
    #: multiply-adds of one image, as the task counts them; None where they cannot be counted
    flops: int | None
    height: int  # of that image
    width: int  # of that image
    uncounted: tuple[str, ...] = ()  # operators that no counter knows


def collect(run: Run, cfg: CfgNode) -> Outcome:
    """Read the outcome of a run, finished or not, from its folder; the config is the run's."""
    record = run.record()
    metrics = {}
    with contextlib.suppress(OSError):  # there is none yet
        metrics = read_metrics(run.folder / "metrics.json")
    times = metrics.get("time", {}).values()
    losses = metrics.get("total_loss", {})
    outcome = Outcome(
        run.arm.name,
        run.seed,
        run.finished,
        record.error,
        record.seconds,
        statistics.median(times) if times else None,
        record.threads,
        record.at_once,
        curve=[(step, loss) for step, loss in losses.items() if math.isfinite(loss)],
        tries=record.tries,
    )
    if run.finished and cfg.DATASETS.TEST:
        outcome.scores = _scores(metrics, cfg)
        if not outcome.scores:
            outcome.error = "no score in its metrics.json"
        try:
            outcome.probes = find_task(cfg).probe(cfg, run.folder)
        except DatasetError as error:
            outcome.error = one_line(error)
    return outcome


def _scores(metrics: Mapping[str, Mapping[int, float]], cfg: CfgNode) -> dict[str, float]:
    """Return the last scores of the first test set; those are left out that are not finite."""
    prefix = f"{cfg.DATASETS.TEST[0]}/" if len(cfg.DATASETS.TEST) > 1 else ""
    *others, common = find_task(cfg).scores(cfg)  # from the rarest to the one that all models have
    scores = {}
    for name in (f"{score}{end}" for score in (common, *others) for end in _BESIDE):
        values = metrics.get(f"{prefix}{name}", {})
        last = values[max(values)] if values else math.nan
        if math.isfinite(last):  # it is not where the data set has nothing to find
            scores[name] = last
    return scores


def probes_of(outcomes: Sequence[Outcome], key: str) -> dict[str, list[Any]]:
    """Return name of an arm -> what a probe found in its runs, without arms whose runs lack it."""
    found: dict[str, list[Any]] = {}
    for outcome in outcomes:
        if key in outcome.probes:
            found.setdefault(outcome.arm, []).append(outcome.probes[key])
    return found


def range_text(row: Mapping[str, Any]) -> str:
    """Return the range of distances of a row of a probe as text: "0 to 30" or "30+"."""
    return f"{row['low']:.0f}+" if row["high"] is None else f"{row['low']:.0f} to {row['high']:.0f}"


def measure_cost(cfg: CfgNode) -> Cost:
    """Count parameters and FLOPs at MIN_SIZE_TEST x MAX_SIZE_TEST, rounded up to multiples of 32."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sides = (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    height, width = (-(-side // 32) * 32 for side in sides)
    with torch.no_grad():
        flops = find_task(cfg).count_flops(model, height, width)
    return Cost(parameters, flops.total, height, width, tuple(sorted(flops.uncounted)))
