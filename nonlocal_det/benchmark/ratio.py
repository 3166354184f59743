"""What one step takes beside another that took turns with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binom


@dataclass(frozen=True)
class Ratio:
    """How many times as long as another step one takes."""

    median: float  # of the ratios within a round
    quartiles: tuple[float, float]  # the first and the third
    interval: tuple[float, float] | None  # 95 % interval of the median; None with fewer than 6 rounds
    rounds: int


@dataclass(frozen=True)
class StepCost:
    """What a step takes beside the one that it is compared with."""

    seconds: float  # median of the runs
    reference_seconds: float  # that of the other step
    time: Ratio
    memory: int | None  # bytes at the peak; None where they are not known
    reference_memory: int | None  # those of the other step

    @property
    def memory_ratio(self) -> float | None:
        """Ratio of the peaks, None where they are not known."""
        return self.memory / self.reference_memory if self.memory and self.reference_memory else None


def ratio_of(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return how many times as long one step takes as another that took turns with it.

    The interval is the one that belongs to the sign test: it reaches from one of the sorted ratios to
    another, whatever their distribution. With 10 rounds these are the second and the ninth.
    """
    ratios = sorted(a / b for a, b in zip(seconds, reference, strict=True))
    count = len(ratios)
    cut = int(binom.ppf(0.025, count, 0.5))  # how many are cut off at each end
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if count > 1 else ratios * 3
    return Ratio(
        median=statistics.median(ratios),
        quartiles=(quartiles[0], quartiles[2]),
        interval=(ratios[cut - 1], ratios[count - cut]) if cut else None,
        rounds=count,
    )
