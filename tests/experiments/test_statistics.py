"""Means and paired intervals, against numbers computed by hand and a printed table of Student's t."""

import math

import pytest

from nonlocal_det.experiments.statistics import paired_difference, summarize

NAN = float("nan")


def test_mean_and_standard_deviation():
    # (9 + 1 + 1 + 9) / 3
    found = summarize([2.0, 4.0, 6.0, 8.0])
    assert (found.mean, found.count) == (5.0, 4)
    assert found.sd == pytest.approx(math.sqrt(20 / 3))


def test_one_run_has_no_deviation_and_none_no_mean():
    found = summarize([3.5])
    assert (found.mean, found.sd, found.count) == (3.5, None, 1)
    assert summarize([]) is None
    assert summarize([NAN]) is None
    assert summarize([1.0, NAN, 3.0]).count == 2


@pytest.mark.parametrize(
    ("differences", "quantile"),
    # t(0.975) at n - 1 degrees of freedom, from a printed table.
    [([1, 3], 12.706), ([1, 2, 6], 4.303), ([1, 2, 3, 4, 5], 2.776), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 2.262)],
)
def test_interval_of_the_paired_difference(differences, quantile):
    n = len(differences)
    # What a seed does to both arms is large and drops out.
    reference = {seed: 50 + 10 * (-1) ** seed for seed in range(n)}
    values = {seed: reference[seed] + differences[seed] for seed in range(n)}
    found = paired_difference(values, reference)
    mean = sum(differences) / n
    sd = math.sqrt(sum((one - mean) ** 2 for one in differences) / (n - 1))
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - quantile * sd / math.sqrt(n), rel=1e-3)
    assert found.high == pytest.approx(mean + quantile * sd / math.sqrt(n), rel=1e-3)
    assert found.seeds == tuple(range(n))


def test_only_seeds_that_both_have_are_paired():
    found = paired_difference({0: 5.0, 1: 7.0, 2: NAN, 9: 100.0}, {1: 6.0, 0: 2.0, 2: 1.0, 5: -100.0})
    assert (found.mean, found.seeds) == (2.0, (0, 1))
    single = paired_difference({0: 5.0}, {0: 3.0})
    assert (single.mean, single.low, single.high) == (2.0, None, None)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_the_sign_of_a_difference_follows_the_order():
    # Mean 3, interval 3 -+ 1.96.
    reference = dict.fromkeys(range(5), 0.0)
    values = {seed: seed + 1.0 for seed in range(5)}
    assert paired_difference(values, reference).low == pytest.approx(1.04, abs=0.01)
    assert paired_difference(reference, values).high == pytest.approx(-1.04, abs=0.01)
    lower = paired_difference({seed: value - 2 for seed, value in values.items()}, reference)
    assert lower.low < 0 < lower.high
