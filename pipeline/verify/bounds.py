"""Computes bounds from a random sample of rows: shares of differing rows, and mean losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def mean_interval(num_rows: int, total: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval of the mean of `num_rows` losses in [0, 1] with sum `total`, valid at all
    numbers of rows at once.

    Beta-binomial mixture (Robbins 1970, "Statistical methods related to the law of the iterated logarithm"; Howard,
    Ramdas, McAuliffe and Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences", sub-Bernoulli
    processes): the means m at which B(½ + s, ½ + n − s) / B(½, ½) / (mˢ (1 − m)ⁿ⁻ˢ) is below 1 / (1 − confidence). For
    losses in [0, 1] with conditional mean m the ratio is a supermartingale, so losses need not be 0 or 1.
    """
    if not num_rows:
        return 0.0, 1.0
    rest = max(0.0, num_rows - total)
    limit = -math.log(1.0 - confidence) + math.log(math.pi)  # B(½, ½) is π
    limit += math.lgamma(1.0 + num_rows) - math.lgamma(0.5 + total) - math.lgamma(0.5 + rest)

    def edge(inside: float, outside: float) -> float:
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if middle in (inside, outside):  # neighbours in double precision
                break
            if -total * math.log(middle) - rest * math.log1p(-middle) > limit:
                outside = middle
            else:
                inside = middle
        return outside

    mean = total / num_rows
    return edge(mean, 0.0) if total > 0 else 0.0, edge(mean, 1.0) if rest > 0 else 1.0


@dataclass
class Losses:
    """Number and sum of the losses of rows."""

    num_rows: int = 0
    total: float = 0.0

    def add(self, loss: float) -> None:
        self.num_rows += 1
        self.total += loss

    @property
    def mean(self) -> float:
        return self.total / self.num_rows if self.num_rows else 0.0
