import pytest

from nonlocal_det.benchmark.ratio import Ratio, ratio_of


def to_ones(values: list[float]) -> Ratio:
    return ratio_of(values, [1.0] * len(values))


def test_median_of_rounds_whatever_their_speed():
    # The second round is ten times as slow for both.
    ratio = ratio_of([2.0, 20.0, 3.0], [1.0, 10.0, 1.0])
    assert ratio.median == 2.0
    assert ratio.quartiles == (2.0, 2.5)
    assert ratio.rounds == 3


# Ranks of the sign test's 95 % interval as statistics books print them.
@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15)])
def test_interval_is_that_of_the_sign_test(count, low, high):
    values = [float(value) for value in range(1, count + 1)]
    assert to_ones(values[::-1]).interval == (low, high)


@pytest.mark.parametrize("count", [1, 5])
def test_no_interval_from_few_rounds(count):
    assert to_ones([1.5] * count).interval is None
    assert to_ones([1.5] * count).quartiles == (1.5, 1.5)
