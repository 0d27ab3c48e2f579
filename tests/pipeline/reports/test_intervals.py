"""Intervals contain the true value as often as they state, and pairs remove what both samples have in common."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.auto.comparison import T_95
from pipeline.reports.intervals import mean_interval, paired_difference, paired_ratio, student_quantile

NUM_TRIALS = 400


@pytest.mark.parametrize(("freedom", "expected"), sorted(T_95.items()))
def test_quantiles_are_those_of_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=6e-4)


def test_quantiles_of_other_levels_and_of_many_values() -> None:
    assert student_quantile(0.99, 5) == pytest.approx(4.0321, abs=1e-4)
    assert student_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.45), rel=1e-9)
    assert student_quantile(0.95, 1_000_000) == pytest.approx(1.959966, abs=1e-5)
    with pytest.raises(ValueError, match="0 degrees of freedom"):
        student_quantile(0.95, 0)


def test_one_pair_determines_no_interval() -> None:
    assert mean_interval([3.0]).high == math.inf
    assert paired_ratio([2.0], [1.0], seed=0).low == -math.inf
    assert paired_ratio([2.0], [1.0]).value == 2.0
    with pytest.raises(ValueError, match="pairs are missing: 2 values beside 1"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive sums"):
        paired_ratio([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize("seeded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [8, 40])
def test_intervals_of_pairs_contain_the_truth_as_often_as_stated(seeded: bool, count: int) -> None:
    rng = np.random.default_rng(count)
    inside = [0, 0]
    for trial in range(NUM_TRIALS):
        common = rng.lognormal(0.0, 1.0, count)  # rows of very different lengths
        ours, others = 0.5 * common * rng.lognormal(0, 0.2, count), common * rng.lognormal(0, 0.2, count)
        seed = trial if seeded else None
        ratio = paired_ratio(ours.tolist(), others.tolist(), seed=seed)
        inside[0] += ratio.low <= 0.5 <= ratio.high
        shifted = common + rng.normal(1.0, 0.3, count)
        difference = paired_difference(shifted.tolist(), common.tolist(), seed=seed)
        inside[1] += difference.low <= 1.0 <= difference.high
    # Three standard errors below 95 %, and a little for the skew of few rows.
    assert min(inside) / NUM_TRIALS > 0.95 - 3 * math.sqrt(0.95 * 0.05 / NUM_TRIALS) - 0.03
    assert max(inside) < NUM_TRIALS or count == 8


def test_pairs_are_much_tighter_than_samples_that_are_not_matched() -> None:
    rng = np.random.default_rng(3)
    common = rng.lognormal(0.0, 1.0, 200)
    ours = 0.5 * common * rng.lognormal(0, 0.05, 200)
    paired = paired_ratio(ours.tolist(), common.tolist())
    shuffled = paired_ratio(ours.tolist(), rng.permutation(common).tolist())
    assert (paired.high - paired.low) * 5 < shuffled.high - shuffled.low


def test_a_seed_repeats_an_interval() -> None:
    values, others = np.random.default_rng(0).lognormal(0.0, 1.0, (2, 50)).tolist()
    assert paired_ratio(values, others, seed=1) == paired_ratio(values, others, seed=1)
    assert paired_ratio(values, others, seed=1) != paired_ratio(values, others, seed=2)
