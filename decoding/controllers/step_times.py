"""What a step costs by rows and levels: what was run, as it would take now, and a fit beyond that.

Knows rows, levels and seconds, and nothing of what they are spent on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from decoding.controllers.base import batch_class
from decoding.controllers.pace_filter import StepPaces

SWEEPS = 60
RIDGE = 1e-3
"""Against features that no measurement tells apart; of scaled ones."""
LEAST_SHARE = 0.1
"""Of the quickest step, which one without drafts is taken to cost at least."""


class StepCosts:
    """Seconds of steps; a cell is a batch class with a number of levels.

    The first step of each shape (rows, levels) is left out: it may have compiled something. A cell's steps may have had
    different numbers of rows, so they are compared at those of its first one, by the fit.
    """

    def __init__(self) -> None:
        self._shapes: set[tuple[int, int]] = set()
        self._paces = StepPaces()
        # Rows of the first step of each cell.
        self._cells: dict[tuple[int, int], int] = {}
        self._weights: list[float] | None = None
        self._factors: dict[int, dict[int, float]] = {}

    def add(self, num_active: int, levels: int, seconds: float, is_usual: bool = True) -> None:
        """Take one step's time; one that did something else besides only counts as its shape's first."""
        is_first = (num_active, levels) not in self._shapes
        self._shapes.add((num_active, levels))
        if not is_usual or is_first:
            return
        cell = batch_class(num_active), levels
        rows = self._cells.setdefault(cell, num_active)
        if rows != num_active:
            if self._weights is None:
                self.refresh()
            assert self._weights is not None
            seconds *= _line(self._weights, rows, levels) / _line(self._weights, num_active, levels)
        if self._paces.add(cell, math.log(max(seconds, 1e-9))):
            # What made these drafts dearer or cheaper has done so with others as well.
            for other in [one for one in self._cells if one != cell and (one[1] > 0) == (levels > 0)]:
                del self._cells[other]
                self._paces.forget(other)

    def num_measured(self, num_active: int, levels: int) -> int:
        """Steps that were measured of the cell that these rows and levels belong to."""
        return self._paces.count((batch_class(num_active), levels))

    def is_settled(self, num_active: int, levels: int) -> bool:
        """Whether steps have not become faster or slower at once since that cell was measured."""
        return self._paces.is_settled((batch_class(num_active), levels))

    @property
    def knows_any(self) -> bool:
        """Whether anything can be said at all."""
        return bool(self._cells)

    @property
    def largest_batch(self) -> int:
        """The largest batch class with a measurement; 0 when there is none."""
        return max((size for size, _ in self._cells), default=0)

    def seconds(self, num_active: int, levels: int) -> float:
        """What a step of so many rows and levels is expected to take."""
        if self._weights is None:
            self.refresh()
        assert self._weights is not None
        # A batch class without a measurement behaves like the nearest one that has some.
        nearest = min(self._factors, key=lambda size: abs(math.log2(size / batch_class(num_active))))
        return _line(self._weights, num_active, levels) * _between(self._factors[nearest], levels)

    def refresh(self) -> None:
        """Follow what was added: T ≈ w0 + w1 · rows · levels + w2 · rows + w3 · levels, and each cell's factor."""
        known = [(rows, cell[1], math.exp(self._paces.log_seconds(cell))) for cell, rows in self._cells.items()]
        self._weights = _fit_line(known)
        self._factors = {}
        for (size, _), (rows, levels, seconds) in zip(self._cells, known, strict=True):
            self._factors.setdefault(size, {})[levels] = seconds / _line(self._weights, rows, levels)


def _features(rows: int, levels: int) -> tuple[float, float, float, float]:
    """In the order in which they are believed: where one number of rows was measured only, a plain step is taken to
    cost the same with fewer, and drafts less, so that a draining batch is worth a look."""
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
    # Steps that contradict each other, as when the machine stood still, may leave nothing for one without drafts.
    least = LEAST_SHARE * min(seconds for *_, seconds in points)
    if found[0] + found[2] < least:
        found[0] = least
    return found


def _between(factors: dict[int, float], levels: int) -> float:
    """The factor at `levels`: measured, or between its measured neighbours, or the nearest one's."""
    below = max((known for known in factors if known <= levels), default=None)
    above = min((known for known in factors if known >= levels), default=None)
    if below is None or above is None:
        return factors[min(factors, key=lambda known: abs(known - levels))]
    share = (levels - below) / (above - below) if above > below else 0.0
    return math.exp((1 - share) * math.log(factors[below]) + share * math.log(factors[above]))
