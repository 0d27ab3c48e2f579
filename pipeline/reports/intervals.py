"""Computes confidence intervals of means, and of differences and ratios of paired samples.

Two kinds: Student's t (needs values that are about normal; ratios are linearised on a logarithmic scale, the delta
method), and a seeded bootstrap over pairs (percentiles, widened for small samples). Both keep pairs together, so what
two samples have in common, such as long rows, does not widen the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
_HALVINGS = 80
_MAX_TERMS = 300


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its confidence interval, which are infinite if one sample does not determine them."""

    value: float
    low: float
    high: float

    @property
    def is_above_one(self) -> bool:
        """Whether the whole interval of a ratio is above 1."""
        return self.low > 1.0

    @property
    def is_below_one(self) -> bool:
        """Whether the whole interval of a ratio is below 1."""
        return self.high < 1.0


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent values with Student's two-sided interval."""
    numbers = np.asarray(values, float)
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(mean, -math.inf, math.inf)
    width = student_quantile(confidence, len(numbers) - 1) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return Interval(mean, mean - width, mean + width)


def paired_difference(
    ours: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE, seed: int | None = None
) -> Interval:
    """Return the mean of `ours[i] - others[i]`, by Student's t, or by a bootstrap if there is a `seed`."""
    left, right = _pairs(ours, others)
    if seed is None:
        return mean_interval((left - right).tolist(), confidence)
    return _bootstrap(lambda picks: (left - right)[picks].mean(axis=-1), len(left), confidence, seed)


def paired_ratio(
    ours: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE, seed: int | None = None
) -> Interval:
    """Return the ratio of the means of paired samples of positive sums, by Student's t, or by a bootstrap if there is
    a `seed`.

    The error of log(mean(x) / mean(y)) is that of the mean of x/mean(x) − y/mean(y), to first order.
    """
    left, right = _pairs(ours, others)
    if min(left.sum(), right.sum()) <= 0:
        raise ValueError("a ratio needs samples with positive sums")
    if seed is not None:
        return _bootstrap(
            lambda picks: left[picks].mean(axis=-1) / np.maximum(right[picks].mean(axis=-1), 1e-300),
            len(left),
            confidence,
            seed,
        )
    ratio = float(left.mean() / right.mean())
    error = mean_interval((left / left.mean() - right / right.mean()).tolist(), confidence)
    return Interval(ratio, ratio * math.exp(error.low), ratio * math.exp(min(error.high, 700.0)))


def _pairs(ours: Sequence[float], others: Sequence[float]) -> tuple[Floats, Floats]:
    left, right = np.asarray(ours, float), np.asarray(others, float)
    if left.shape != right.shape or not len(left):
        raise ValueError(f"pairs are missing: {len(left)} values beside {len(right)}")
    return left, right


def _bootstrap(statistic: Callable[[NDArray[np.int64]], Floats], count: int, confidence: float, seed: int) -> Interval:
    """Return a statistic of `count` pairs with the percentiles of it over resamples; picks are (…, count) indices."""
    value = float(statistic(np.arange(count)))
    if count < 2:
        return Interval(value, -math.inf, math.inf)
    picks = np.random.default_rng(seed).integers(0, count, (NUM_RESAMPLES, count))
    low, high = np.quantile(statistic(picks), [(1 - confidence) / 2, (1 + confidence) / 2])
    normal = student_quantile(confidence, 1_000_000)
    wider = math.sqrt(count / (count - 1)) * student_quantile(confidence, count - 1) / normal
    return Interval(value, value - wider * max(0.0, value - float(low)), value + wider * max(0.0, float(high) - value))


def student_quantile(confidence: float, freedom: int) -> float:
    """Return the t with P[|T| ≤ t] = confidence for Student's distribution, by bisection."""
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(f"no quantile for {freedom} degrees of freedom at confidence {confidence}")
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Return P[|T| ≤ t] = 1 − I_x(ν/2, 1/2) with x = ν / (ν + t²)."""
    square = t * t
    return 1.0 - _incomplete_beta(freedom / (freedom + square), square / (freedom + square), freedom / 2, 0.5)


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), with `rest` = 1 − x, by its continued fraction
    (Abramowitz and Stegun 26.5.8; modified Lentz's method)."""
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(rest, x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, _MAX_TERMS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + factor * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + factor / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction / a
