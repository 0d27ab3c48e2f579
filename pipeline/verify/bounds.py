"""Computes bounds of the share of differing rows from a random sample of rows."""

from __future__ import annotations

import math

import numpy as np

CONFIDENCE = 0.95
_HALVINGS = 60


def detection_probability(share: float, num_faulty: int) -> float:
    """Return the probability, 1 − (1 − s)ᵏ, that a share s of the rows contains at least one of k faulty rows; every
    row is chosen independently."""
    return 1.0 if share >= 1.0 else -math.expm1(num_faulty * math.log1p(-share))


def upper_share(num_different: int, num_rows: int, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided Clopper–Pearson bound of a share: the p at which at most `num_different` of `num_rows` rows
    differ with probability 1 − confidence. For no differing row, p = 1 − (1 − confidence)^(1/n), about 3/n at 95 %."""
    if num_different >= num_rows:
        return 1.0
    return _solved(num_different, num_rows, 1.0 - confidence)


def share_interval(num_different: int, num_rows: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the two-sided Clopper–Pearson interval of a share."""
    alpha = (1.0 - confidence) / 2
    low = 0.0 if num_different == 0 else 1.0 - upper_share(num_rows - num_different, num_rows, 1.0 - alpha)
    return low, upper_share(num_different, num_rows, 1.0 - alpha)


def _solved(count: int, num_rows: int, alpha: float) -> float:
    """Return p with P[Binomial(n, p) ≤ count] = alpha, by bisection."""
    k = np.arange(count + 1, dtype=np.float64)
    steps = np.log((num_rows - k[:-1]) / k[1:]) if count else np.zeros(0)
    choices = np.concatenate([[0.0], np.cumsum(steps)])  # log of the binomial coefficients
    low, high = count / num_rows, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        terms = choices + k * math.log(max(middle, 1e-300)) + (num_rows - k) * math.log1p(-min(middle, 1 - 1e-16))
        largest = float(terms.max())
        if largest + math.log(float(np.exp(terms - largest).sum())) > math.log(alpha):
            low = middle
        else:
            high = middle
    return high
