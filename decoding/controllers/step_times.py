"""Models of the seconds of a step, by rows and levels, and of the drafter's prompt prefill."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from decoding.controllers.base import PrefillTime, batch_class

NOISE = 0.05
"""Standard deviation of one step's log time."""
PACE_WALK, OWN_WALK = 0.03, 0.004
"""Process noise per step, in log time: common to all kinds, and of a single kind."""
UNKNOWN = 100.0
"""Prior standard deviation of a kind's log time."""
OUTLIER = 3.0
"""Deviations beyond which a measurement is clipped; a second one in a row on the same side is a sudden change."""
MOST_LEAP = math.log(2.0)
"""Largest sudden change that is common to all kinds; a larger one concerns a single kind."""
FEW_STEPS = 3
"""Number of first steps of a kind that may all be delayed."""
SWEEPS = 60
RIDGE = 1e-3
"""Regularisation of the scaled features."""
LEAST_SHARE = 0.1
"""Least time of a step without drafts, as a share of the fastest step."""
MAX_SAMPLES = 16
MEMORY_SAMPLES = 256.0
"""Memory of the exponential decay, in finished samples."""


class StepTimeModel:
    """Seconds of a step by rows and levels; a cell is a batch class with a number of levels.

    The first step of each shape (rows, levels) is ignored, because it may include compilation. The fit scales the steps
    of a cell to the number of rows of its first one.
    """

    def __init__(self) -> None:
        self._shapes: set[tuple[int, int]] = set()
        self._filter = StepTimeFilter()
        # Rows of the first step of each cell.
        self._cells: dict[tuple[int, int], int] = {}
        self._weights: list[float] | None = None
        self._factors: dict[int, dict[int, float]] = {}

    def add(self, num_active: int, levels: int, seconds: float, is_usual: bool = True) -> None:
        """Add one step's time; an unusual step only counts as its shape's first."""
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
            for other in [one for one in self._cells if one != cell and (one[1] > 0) == (levels > 0)]:
                del self._cells[other]
                self._filter.forget(other)

    def num_measured(self, num_active: int, levels: int) -> int:
        """Measured steps of a cell."""
        return self._filter.count((batch_class(num_active), levels))

    def is_current(self, num_active: int, levels: int) -> bool:
        """Whether no sudden change of step times followed the cell's last measurement."""
        return self._filter.is_current((batch_class(num_active), levels))

    @property
    def is_fitted(self) -> bool:
        """Whether any step was measured."""
        return bool(self._cells)

    def seconds(self, num_active: int, levels: int) -> float:
        """Expected seconds of a step."""
        # A batch class without measurements uses the factors of the nearest one.
        line = self._line(num_active, levels)
        nearest = min(self._factors, key=lambda size: abs(math.log2(size / batch_class(num_active))))
        return line * _between(self._factors[nearest], levels)

    def _line(self, rows: int, levels: int) -> float:
        if self._weights is None:
            self.refresh()
        assert self._weights is not None
        return _line(self._weights, rows, levels)

    def refresh(self) -> None:
        """Fit T ≈ w0 + w1 · rows · levels + w2 · rows + w3 · levels, and each cell's factor."""
        known = [(rows, cell[1], math.exp(self._filter.log_seconds(cell))) for cell, rows in self._cells.items()]
        self._weights = _fit_line(known)
        self._factors = {}
        for (size, _), (rows, levels, seconds) in zip(self._cells, known, strict=True):
            self._factors.setdefault(size, {})[levels] = seconds / _line(self._weights, rows, levels)


class StepTimeFilter:
    """Kalman filter (Kalman 1960) over the log times of all kinds of steps.

    The state has a common part, because clocks, load and context length change all kinds together, and a slowly
    changing part per kind.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._times = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        # The last step if it was an outlier: its kind and deviation.
        self._odd: tuple[Hashable, float] | None = None
        # Kinds without a measurement since the last sudden change.
        self._outdated: set[Hashable] = set()

    def count(self, kind: Hashable) -> int:
        """Measured steps of this kind."""
        return self._counts.get(kind, 0)

    def log_seconds(self, kind: Hashable) -> float:
        """The present log seconds of a kind that was measured."""
        return float(self._times[self._places[kind]])

    def is_current(self, kind: Hashable) -> bool:
        """Whether no sudden change followed the kind's last measurement."""
        return kind not in self._outdated

    def forget(self, kind: Hashable) -> None:
        """Remove a kind."""
        place = self._places.pop(kind)
        self._places = {other: at - (at > place) for other, at in self._places.items()}
        del self._counts[kind]
        self._outdated.discard(kind)
        self._times = np.delete(self._times, place)
        self._covariance = np.delete(np.delete(self._covariance, place, axis=0), place, axis=1)

    def add(self, kind: Hashable, log_seconds: float) -> bool:
        """Add a measurement; returns whether this kind alone changed suddenly."""
        if kind not in self._places:
            self._places[kind] = len(self._places)
            self._counts[kind] = 0
            self._times = np.append(self._times, log_seconds)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[-1, -1] = UNKNOWN**2
        self._counts[kind] += 1
        place, known = self._places[kind], self._covariance
        known += PACE_WALK**2
        known[np.diag_indices_from(known)] += OWN_WALK**2
        odd = log_seconds - float(self._times[place])
        bound = OUTLIER * math.sqrt(known[place, place] + NOISE**2)
        has_changed = False
        if odd < -bound and self._counts[kind] <= FEW_STEPS:
            # The steps before were delayed.
            known[place, place] += UNKNOWN**2
        elif abs(odd) <= bound:
            self._odd = None
        elif self._odd is not None and self._odd[0] == kind and self._odd[1] * odd > 0:
            has_changed = min(abs(odd), abs(self._odd[1])) > MOST_LEAP
            if has_changed:
                known[place, place] += odd**2
            else:
                known += odd**2
            self._odd = None
            self._outdated.update(self._places)
        else:
            self._odd = kind, odd
            odd = math.copysign(bound, odd)
        self._outdated.discard(kind)
        column = known[:, place].copy()
        gain = column / (column[place] + NOISE**2)
        self._times = self._times + odd * gain
        self._covariance = known - np.outer(gain, column)
        return has_changed


class PrefillTimeModel:
    """Prefill seconds per prompt token, and the rate at which samples finish.

    The rate is a hazard: finished samples over the tokens of all samples, running ones included.
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
        """Expected prefill seconds of so many tokens; 0 before the first prefill.

        Uses the median, because single prefills may include compilation.
        """
        rates = [one.seconds / one.num_tokens for one in self._prefills]
        return num_tokens * statistics.median_low(rates) if rates else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Prefill seconds per generated token while every finished sample is replaced by another."""
        return self.prefill_s_of(1) * self._num_prompt / self._num_generated if self._num_generated else 0.0

    def remaining_tokens(self, num_active: int) -> float:
        """Expected remaining tokens of so many rows: half an output each."""
        return num_active * self._num_generated / (2.0 * self._num_ended) if self._num_ended else math.inf


def _features(rows: int, levels: int) -> tuple[float, float, float, float]:
    """Features, preferred ones first: with one measured number of rows, plain steps cost the same with fewer rows, and
    drafts less."""
    return 1.0, float(rows * levels), float(rows), float(levels)


def _line(weights: Sequence[float], rows: int, levels: int) -> float:
    return sum(weight * value for weight, value in zip(weights, _features(rows, levels), strict=True))


def _fit_line(points: Sequence[tuple[int, int, float]]) -> list[float]:
    """Non-negative weights of the features of (rows, levels, seconds), by coordinate descent on relative errors."""
    rows_of = [[value / seconds for value in _features(rows, levels)] for rows, levels, seconds in points]
    scales = [max(row[i] for row in rows_of) or 1.0 for i in range(4)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows_of]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(4)] for i in range(4)]
    wanted = [sum(row[i] for row in scaled) for i in range(4)]
    weights = [0.0] * 4
    for _ in range(SWEEPS):
        for i in range(4):
            rest = wanted[i] - sum(gram[i][j] * weights[j] for j in range(4) if j != i)
            weights[i] = max(0.0, rest / (gram[i][i] + RIDGE * len(points)))
    found = [weight / scale for weight, scale in zip(weights, scales, strict=True)]
    # Inconsistent measurements may leave no time for a step without drafts.
    least = LEAST_SHARE * min(seconds for *_, seconds in points)
    if found[0] + found[2] < least:
        found[0] = least
    return found


def _between(factors: dict[int, float], levels: int) -> float:
    """The factor at `levels`: measured, interpolated, or the nearest one."""
    below = max((known for known in factors if known <= levels), default=None)
    above = min((known for known in factors if known >= levels), default=None)
    if below is None or above is None:
        return factors[min(factors, key=lambda known: abs(known - levels))]
    share = (levels - below) / (above - below) if above > below else 0.0
    return math.exp((1 - share) * math.log(factors[below]) + share * math.log(factors[above]))
