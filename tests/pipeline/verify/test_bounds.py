"""Bounds from samples of rows: against tables of the binomial distribution, and their coverage in simulations."""

from __future__ import annotations

import math

import pytest

from pipeline.verify.bounds import detection_probability, share_interval, upper_share


def test_clopper_pearson_gives_the_published_numbers() -> None:
    # No event among n: 1 − 0.05^(1/n), and the rule of three, 3/n.
    assert upper_share(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-9)
    assert upper_share(0, 3000) == pytest.approx(3 / 3000, rel=2e-3)
    # R: binom.test(3, 10)$conf.int, and binom.test(10, 10).
    assert share_interval(3, 10) == pytest.approx((0.06673951, 0.6524529), abs=1e-7)
    assert share_interval(10, 10) == pytest.approx((0.6915029, 1.0), abs=1e-7)
    assert share_interval(0, 10) == pytest.approx((0.0, 0.3084971), abs=1e-7)
    assert share_interval(5000, 50_000) == pytest.approx((0.09738, 0.10266), abs=1e-4)


@pytest.mark.parametrize(("count", "num_rows"), [(0, 7), (2, 40), (39, 40), (17, 500)])
def test_the_bound_leaves_five_percent_below_it(count: int, num_rows: int) -> None:
    share = upper_share(count, num_rows)
    below = sum(math.comb(num_rows, k) * share**k * (1 - share) ** (num_rows - k) for k in range(count + 1))
    assert below == pytest.approx(0.05, rel=1e-6)


def test_detection_is_the_chance_that_one_faulty_sample_is_chosen() -> None:
    assert detection_probability(0.01, 1) == pytest.approx(0.01)
    assert detection_probability(0.01, 300) == pytest.approx(1 - 0.99**300)
    assert detection_probability(1.0, 1) == 1.0
    assert detection_probability(1e-9, 1_000_000_000) == pytest.approx(1 - math.exp(-1), rel=1e-6)
