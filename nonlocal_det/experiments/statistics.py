"""Means over seeds, and differences between two arms that were run with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.stats import t as student_t

LEVEL = 0.95


@dataclass(frozen=True)
class Summary:
    """What several runs of one arm reached."""

    mean: float
    sd: float | None  # their standard deviation (divisor n - 1); None for a single run
    count: int  # of the runs


@dataclass(frozen=True)
class Difference:
    """How much more one arm reached than another, run by run of the same seed."""

    mean: float  # of the differences
    low: float | None  # lower end of the 95 % confidence interval of the mean; None for a single pair
    high: float | None  # its upper end
    seeds: tuple[int, ...]  # of the pairs


def summarize(values: Iterable[float]) -> Summary | None:
    """Return mean and standard deviation, without NaN; None where there is no value."""
    found = [value for value in values if not math.isnan(value)]
    if not found:
        return None
    return Summary(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """Compare two arms by Student's t interval over the seeds that both have.

    With n pairs the interval is mean +- t(0.975, n - 1) * s / sqrt(n), s the standard deviation of the
    differences. Pairing takes out what a seed does to both arms, such as the order of the data.

    Args:
        values: seed -> figure of the arm; NaN is left out.
        reference: the same of the arm that it is compared with.

    Returns:
        The difference; None where the arms have no seed in common.
    """
    pairs = {seed: values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())}
    summary, seeds = summarize(pairs.values()), tuple(seed for seed in pairs if not math.isnan(pairs[seed]))
    if summary is None or summary.sd is None:
        return Difference(summary.mean, None, None, seeds) if summary else None
    quantile = float(student_t.ppf(0.5 + LEVEL / 2, summary.count - 1))
    half = quantile * summary.sd / math.sqrt(summary.count)
    return Difference(summary.mean, summary.mean - half, summary.mean + half, seeds)
