"""Estimates the seconds of a step by rows and levels, and of the drafter's prompt prefill."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from decoding.controllers.base import PrefillTime, batch_class
from decoding.controllers.pace_filter import StepTimeFilter

MAX_SAMPLES = 16
MEMORY_SAMPLES = 256.0
"""Time constant of the exponential decay, in finished samples."""
SWEEPS = 60
RIDGE = 1e-3
"""L2 regularisation of the weights of the scaled features."""
MIN_SHARE = 0.1
"""Minimum time of a step without drafts, as a share of the fastest step."""


class StepTimeModel:
    """Model of a step's seconds by rows and levels.

    A kind of step is (batch class, levels). The first step of each shape (rows, levels) is ignored, because it may
    include compilation. Later times of a kind are scaled by the fit to the number of rows of the kind's first measured
    step.
    """

    def __init__(self) -> None:
        self._shapes: set[tuple[int, int]] = set()
        self._filter = StepTimeFilter()
        # Rows of the first measured step of each kind.
        self._cells: dict[tuple[int, int], int] = {}
        self._weights: list[float] | None = None
        self._factors: dict[int, dict[int, float]] = {}

    def add(self, num_active: int, levels: int, seconds: float, is_usual: bool = True) -> None:
        """Add one step's time; a step with `is_usual` False is not measured, but counts as the first of its shape."""
        is_first = (num_active, levels) not in self._shapes
        self._shapes.add((num_active, levels))
        if not is_usual or is_first:
            return
        cell = batch_class(num_active), levels
        rows = self._cells.setdefault(cell, num_active)
        if rows != num_active:
            seconds *= self._line(rows, levels) / self._line(num_active, levels)
        if self._filter.add(cell, math.log(max(seconds, 1e-9))):
            # The times of other depths with drafts have changed as well.
            for other in [key for key in self._cells if key != cell and (key[1] > 0) == (levels > 0)]:
                del self._cells[other]
                self._filter.forget(other)

    def num_measured(self, num_active: int, levels: int) -> int:
        """Return the number of measured steps of this batch class and depth."""
        cell = batch_class(num_active), levels
        return self._filter.count(cell) if cell in self._cells else 0

    def is_current(self, num_active: int, levels: int) -> bool:
        """Return whether step times did not suddenly change after this batch class and depth was last measured."""
        return self._filter.is_current((batch_class(num_active), levels))

    @property
    def is_fitted(self) -> bool:
        """Whether any step was measured."""
        return bool(self._cells)

    def seconds(self, num_active: int, levels: int) -> float:
        """Return the expected seconds of a step: the fit times the interpolated factor of its batch class."""
        line = self._line(num_active, levels)
        # A batch class without measurements uses the factors of the nearest one.
        nearest = min(self._factors, key=lambda size: abs(math.log2(size / batch_class(num_active))))
        return line * _between(self._factors[nearest], levels)

    def _line(self, rows: int, levels: int) -> float:
        if self._weights is None:
            self.refresh()
        assert self._weights is not None
        return _line(self._weights, rows, levels)

    def refresh(self) -> None:
        """Fit the line, see `_features`; set each kind's factor measured / fitted time."""
        measured = [(rows, cell[1], math.exp(self._filter.log_seconds(cell))) for cell, rows in self._cells.items()]
        self._weights = _fit_line(measured)
        self._factors = {}
        for (size, _), (rows, levels, seconds) in zip(self._cells, measured, strict=True):
            self._factors.setdefault(size, {})[levels] = seconds / _line(self._weights, rows, levels)


NUM_FEATURES = 4


def _features(rows: int, levels: int) -> tuple[float, float, float, float]:
    """Return the features of T ≈ w0 + w1 · drafts + w2 · rows + w3 · levels; earlier ones explain the measurements of a
    single number of rows."""
    return 1.0, float(rows * levels), float(rows), float(levels)


def _line(weights: Sequence[float], rows: int, levels: int) -> float:
    return sum(weight * value for weight, value in zip(weights, _features(rows, levels), strict=True))


def _fit_line(points: Sequence[tuple[int, int, float]]) -> list[float]:
    """Fit non-negative feature weights to points (rows, levels, seconds) by coordinate descent on relative errors."""
    rows_of = [[value / seconds for value in _features(rows, levels)] for rows, levels, seconds in points]
    each = range(NUM_FEATURES)
    scales = [max(row[i] for row in rows_of) or 1.0 for i in each]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows_of]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in each] for i in each]
    wanted = [sum(row[i] for row in scaled) for i in each]
    weights = [0.0] * NUM_FEATURES
    for _ in range(SWEEPS):
        for i in each:
            rest = wanted[i] - sum(gram[i][j] * weights[j] for j in each if j != i)
            weights[i] = max(0.0, rest / (gram[i][i] + RIDGE * len(points)))
    coefficients = [weight / scale for weight, scale in zip(weights, scales, strict=True)]
    # Inconsistent measurements may give a step without drafts almost no time.
    least = MIN_SHARE * min(seconds for *_, seconds in points)
    if coefficients[0] + coefficients[2] < least:
        coefficients[0] = least
    return coefficients


def _between(factors: dict[int, float], levels: int) -> float:
    """Return the factor at `levels`: measured, log-interpolated, or the factor of the nearest depth."""
    below = max((depth for depth in factors if depth <= levels), default=None)
    above = min((depth for depth in factors if depth >= levels), default=None)
    if below is None or above is None:
        return factors[min(factors, key=lambda depth: abs(depth - levels))]
    share = (levels - below) / (above - below) if above > below else 0.0
    return math.exp((1 - share) * math.log(factors[below]) + share * math.log(factors[above]))


class PrefillTimeModel:
    """Model of prefill seconds per prompt token and of the rate at which samples finish.

    The rate is finished samples per generated token, over the tokens of all samples, unfinished ones included.
    """

    def __init__(self) -> None:
        self._prefills: deque[PrefillTime] = deque(maxlen=MAX_SAMPLES)
        self._num_prompt, self._num_ended, self._num_generated = 0.0, 0.0, 0.0

    def add(self, prefill: PrefillTime, num_tokens: int, ended: Sequence[int]) -> None:
        """Add one step: its prefill, its generated tokens, and the prompt lengths of the rows that finished."""
        if prefill.num_tokens:
            self._prefills.append(prefill)
        keep = (1.0 - 1.0 / MEMORY_SAMPLES) ** len(ended)
        self._num_prompt = keep * self._num_prompt + sum(ended)
        self._num_ended = keep * self._num_ended + len(ended)
        self._num_generated = keep * self._num_generated + num_tokens

    def prefill_s_of(self, num_tokens: int) -> float:
        """Return the expected prefill seconds of `num_tokens` prompt tokens; 0 before the first prefill.

        Uses the median of recent prefills, because single prefills may include compilation.
        """
        rates = [prefill.seconds / prefill.num_tokens for prefill in self._prefills]
        return num_tokens * statistics.median_low(rates) if rates else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Prefill seconds per generated token while every finished sample is replaced by a new sample."""
        return self.prefill_s_of(1) * self._num_prompt / self._num_generated if self._num_generated else 0.0

    def remaining_tokens(self, num_active: int) -> float:
        """Return the expected remaining tokens of `num_active` rows: half a mean output each."""
        return num_active * self._num_generated / (2.0 * self._num_ended) if self._num_ended else math.inf
