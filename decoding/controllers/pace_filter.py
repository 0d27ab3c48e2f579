"""Kalman filter (Kalman 1960) over the log times of all kinds of steps.

The state has a common part, because clocks, load and context length change all kinds together, and a slowly changing
part per kind. Kinds that were not run for long are therefore estimated from those that are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

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


class StepTimeFilter:
    """Tracks the log times of all kinds of steps."""

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
        place, covariance = self._places[kind], self._covariance
        covariance += PACE_WALK**2
        covariance[np.diag_indices_from(covariance)] += OWN_WALK**2
        odd = log_seconds - float(self._times[place])
        bound = OUTLIER * math.sqrt(covariance[place, place] + NOISE**2)
        has_changed = False
        if odd < -bound and self._counts[kind] <= FEW_STEPS:
            # The steps before were delayed.
            covariance[place, place] += UNKNOWN**2
        elif abs(odd) <= bound:
            self._odd = None
        elif self._odd is not None and self._odd[0] == kind and self._odd[1] * odd > 0:
            has_changed = min(abs(odd), abs(self._odd[1])) > MOST_LEAP
            if has_changed:
                covariance[place, place] += odd**2
            else:
                covariance += odd**2
            self._odd = None
            self._outdated.update(self._places)
        else:
            self._odd = kind, odd
            odd = math.copysign(bound, odd)
        self._outdated.discard(kind)
        column = covariance[:, place].copy()
        gain = column / (column[place] + NOISE**2)
        self._times = self._times + odd * gain
        self._covariance = covariance - np.outer(gain, column)
        return has_changed
