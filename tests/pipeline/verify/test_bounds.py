"""Bounds from samples of rows: against tables of the binomial distribution, and their coverage in simulations."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.verify.bounds import detection_probability, mean_interval, share_interval, upper_share


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


def losses_of(seed: int, num_rows: int) -> tuple[list[float], float]:
    """Losses of one of three distributions, and their mean."""
    rng, mean = random.Random(seed), (0.02, 0.1, 0.4)[seed % 3]
    if seed % 2:
        return [2 * mean * rng.random() for _ in range(num_rows)], mean
    return [float(rng.random() < mean) for _ in range(num_rows)], mean


def test_the_interval_of_the_mean_loss_holds_at_every_number_of_rows_at_once() -> None:
    """Of 100 streams, at most 5 % may ever leave it; an interval for a fixed number of rows fails in far more."""
    missed = naive_missed = 0
    for seed in range(100):
        losses, mean = losses_of(seed, 400)
        totals = np.cumsum(losses).tolist()
        intervals = [mean_interval(row, total) for row, total in enumerate(totals, 1)]
        missed += any(not low <= mean <= high for low, high in intervals)
        counts = np.arange(1, 401)
        average = np.array(totals) / counts
        spread = np.sqrt(np.maximum(np.cumsum(np.square(losses)) / counts - average**2, 0) / counts)
        naive_missed += bool((np.abs(average - mean)[30:] > 1.96 * spread[30:]).any())
    assert missed <= 5
    assert naive_missed > 20, "the streams do not show the fault of looking again and again"


def test_the_interval_of_the_mean_loss_solves_its_equation() -> None:
    assert mean_interval(0, 0.0) == (0.0, 1.0)
    assert mean_interval(50, 50.0)[1] == 1.0
    for num_rows, total in ((1000, 0.0), (200, 37.5), (20, 1.0)):
        low, high = mean_interval(num_rows, total)
        assert low <= total / num_rows <= high
        for edge in {low, high} - {0.0, 1.0}:
            beta = math.lgamma(total + 0.5) + math.lgamma(num_rows - total + 0.5) - math.lgamma(num_rows + 1)
            ratio = beta - math.log(math.pi) - total * math.log(edge) - (num_rows - total) * math.log1p(-edge)
            assert ratio == pytest.approx(math.log(20), abs=1e-6)
    assert mean_interval(1000, 0.0)[1] < 0.008


@given(num_rows=st.integers(1, 10_000), share=st.floats(0, 1), off=st.sampled_from([0.0, 1e-12, 1e-9, 1e-6]))
@example(num_rows=10, share=1.0, off=1e-6)
@example(num_rows=3, share=0.0, off=1e-12)
def test_the_interval_of_the_mean_loss_exists_for_every_sum(num_rows: int, share: float, off: float) -> None:
    """Also for sums within rounding of 0 and of the number of rows."""
    for total in (share * num_rows, off, num_rows - off):
        low, high = mean_interval(num_rows, total)
        assert 0.0 <= low <= total / num_rows <= high <= 1.0
