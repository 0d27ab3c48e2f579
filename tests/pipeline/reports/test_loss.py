"""The interval of the mean loss holds at all numbers of rows together, and the budget is decided by it alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.acceptance import AuditConfig
from pipeline.reports import loss
from pipeline.reports.loss import Losses, fewest_rows, loss_interval, sum_of, verdict


def integrated_ratio(num_rows: int, sum_of_losses: float, mean: float, num_points: int = 200_000) -> float:
    """The mixture of likelihood ratios by the midpoint rule, after the substitution p = sin²(θ), under which the prior
    Beta(1/2, 1/2) is uniform in θ: an oracle without gamma functions."""
    angle = (np.arange(num_points) + 0.5) / num_points * math.pi / 2
    p = np.sin(angle) ** 2
    rest = num_rows - sum_of_losses
    logs = sum_of_losses * np.log(p / mean) + rest * np.log((1 - p) / (1 - mean))
    return float(np.exp(logs).mean())


@pytest.mark.parametrize(
    ("num_rows", "total"), [(1, 0.0), (1, 1.0), (10, 3.0), (100, 3.25), (400, 0.0), (400, 400.0), (1000, 512.5)]
)
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_mixture_reaches_the_level_at_the_ends_of_the_interval(
    num_rows: int, total: float, confidence: float
) -> None:
    low, high = loss_interval(num_rows, total, confidence)
    assert 0.0 <= low <= total / num_rows <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            assert integrated_ratio(num_rows, total, end) == pytest.approx(1 / (1 - confidence), rel=2e-3)
    assert (low == 0.0) == (total == 0.0)
    assert (high == 1.0) == (total == num_rows)


@pytest.mark.parametrize("kind", ["bernoulli", "beta"])
@pytest.mark.parametrize("mean", [0.01, 0.2, 0.7])
def test_at_most_one_sequence_in_ten_ever_leaves_the_interval(kind: str, mean: float) -> None:
    """Looked at after every row; an interval for a fixed number of rows, looked at so, misses far more often."""
    rng = np.random.default_rng(11)
    num_runs, num_rows, confidence = 400, 600, 0.9
    shape = (num_runs, num_rows)
    drawn = (rng.random(shape) < mean) if kind == "bernoulli" else rng.beta(4 * mean, 4 * (1 - mean), shape)
    sums = np.cumsum(drawn, axis=1)
    n = np.arange(1, num_rows + 1)
    # The ratio of the mixture at the true mean, in closed form for all runs at once.
    lgamma = np.vectorize(math.lgamma)
    logs = lgamma(sums + 0.5) + lgamma(n - sums + 0.5) - lgamma(n + 1.0) - math.log(math.pi)
    logs += -sums * math.log(mean) - (n - sums) * math.log1p(-mean)
    outside = logs > -math.log(1 - confidence)
    # The same decision as that of the intervals, at places where they are close to it and far from it.
    for run, row in [(0, 0), (1, 99), (2, 599), *zip(*np.nonzero(outside), strict=True)][:40]:
        low, high = loss_interval(int(n[row]), float(sums[run, row]), confidence)
        assert (not low < mean < high) == outside[run, row]
    assert outside.any(axis=1).mean() <= 1 - confidence
    if kind == "beta":  # its losses vary less, and the interval does not use it
        return
    deviation = np.sqrt(np.maximum(sums / n * (1 - sums / n), 1e-12) / n)
    naive = np.abs(sums / n - mean) > 1.645 * deviation
    assert naive[:, 30:].any(axis=1).mean() > 2 * (1 - confidence), "the control has no power"


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), st.integers(0, 60))
def test_sums_of_losses_do_not_depend_on_order_or_parts(losses: list[float], cut: int) -> None:
    whole = sum_of(loss.pa.chunked_array([[*losses, None]]))
    parts = sum_of(loss.pa.array(losses[cut:], loss.pa.float64())).plus(
        sum_of(loss.pa.array(losses[:cut], loss.pa.float64()))
    )
    assert whole.num_rows == parts.num_rows == len(losses)
    assert whole.total == pytest.approx(parts.total)


def test_the_budget_is_exceeded_if_the_loss_certainly_is_or_is_not_shown_to_hold_in_time() -> None:
    audit = AuditConfig(share=0.1, max_loss=0.1, min_rows=200)
    assert verdict(audit, Losses()) == ""
    assert verdict(audit, Losses(20, 2.0)) == "", "the upper end is far above, and 20 rows are few"
    certain = verdict(audit, Losses(20, 12.0))
    assert "0.6000" in certain
    assert "certainly above audit.max_loss (0.1)" in certain
    assert verdict(audit, Losses(199, 15.0)) == ""
    assert "not shown to be within, after audit.min_rows (200) rows" in verdict(audit, Losses(200, 15.0))
    assert verdict(audit, Losses(200, 4.0)) == ""
    assert verdict(audit.model_copy(update={"max_loss": None}), Losses(200, 200.0)) == ""


@pytest.mark.parametrize(("max_loss", "confidence"), [(0.5, 0.5), (0.05, 0.95), (0.001, 0.99)])
def test_the_fewest_rows_are_the_first_that_can_show_the_budget(max_loss: float, confidence: float) -> None:
    audit = AuditConfig(share=1.0, max_loss=max_loss, confidence=confidence)
    fewest = fewest_rows(audit)
    assert loss_interval(fewest, 0.0, confidence)[1] <= max_loss
    assert fewest == 1 or loss_interval(fewest - 1, 0.0, confidence)[1] > max_loss


@given(num_rows=st.integers(1, 10_000), share=st.floats(0, 1), off=st.sampled_from([0.0, 1e-12, 1e-9, 1e-6]))
@example(num_rows=10, share=1.0, off=1e-6)
@example(num_rows=3, share=0.0, off=1e-12)
def test_the_interval_of_the_mean_loss_exists_for_every_sum(num_rows: int, share: float, off: float) -> None:
    """Also for sums within rounding of 0 and of the number of rows."""
    for total in (share * num_rows, off, num_rows - off):
        low, high = loss_interval(num_rows, total, 0.95)
        assert 0.0 <= low <= total / num_rows <= high <= 1.0
