"""Tracks step times with a Kalman filter (Kalman 1960) over the log times of all kinds of steps.

The process noise has a common part, because clocks, load and context length change all kinds together, and a smaller
part per kind. Measurements of one kind therefore also update the estimates of kinds that were not run recently.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

NOISE = 0.05
"""Standard deviation of one step's log time."""
PACE_WALK, OWN_WALK = 0.03, 0.004
"""Standard deviation of the process noise per step, in log time: common to all kinds, and of a single kind."""
UNKNOWN = 100.0
"""Prior standard deviation of a kind's log time."""
OUTLIER = 3.0
"""Standard deviations beyond which a measurement is clipped; two in a row on the same side are a sudden change."""
MAX_LEAP = math.log(2.0)
"""Largest sudden change, in log time, that applies to all kinds; a larger change applies to one kind only."""
FEW_STEPS = 3
"""Number of first steps of a kind whose estimate is discarded if a much faster step follows."""


class StepTimeFilter:
    """Kalman filter over the log times of all kinds of steps; a kind is any hashable key."""

    def __init__(self) -> None:
        self._indices: dict[Hashable, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._times = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        # Kind and deviation of the last step if it was an outlier.
        self._odd: tuple[Hashable, float] | None = None
        # Kinds without a measurement since the last sudden change.
        self._outdated: set[Hashable] = set()

    def count(self, kind: Hashable) -> int:
        """Return the number of measured steps of a kind."""
        return self._counts.get(kind, 0)

    def log_seconds(self, kind: Hashable) -> float:
        """Return the current estimate of the log seconds of a measured kind."""
        return float(self._times[self._indices[kind]])

    def is_current(self, kind: Hashable) -> bool:
        """Return whether no sudden change occurred after the kind's last measurement."""
        return kind not in self._outdated

    def forget(self, kind: Hashable) -> None:
        """Remove a kind and its measurements."""
        index = self._indices.pop(kind)
        self._indices = {other: at - (at > index) for other, at in self._indices.items()}
        del self._counts[kind]
        self._outdated.discard(kind)
        self._times = np.delete(self._times, index)
        self._covariance = np.delete(np.delete(self._covariance, index, axis=0), index, axis=1)

    def add(self, kind: Hashable, log_seconds: float) -> bool:
        """Add a measurement; return whether it revealed a sudden change of this kind only."""
        if kind not in self._indices:
            self._indices[kind] = len(self._indices)
            self._counts[kind] = 0
            self._times = np.append(self._times, log_seconds)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[-1, -1] = UNKNOWN**2
        self._counts[kind] += 1
        index, covariance = self._indices[kind], self._covariance
        covariance += PACE_WALK**2
        covariance[np.diag_indices_from(covariance)] += OWN_WALK**2
        odd = log_seconds - float(self._times[index])
        bound = OUTLIER * math.sqrt(covariance[index, index] + NOISE**2)
        has_changed = False
        if odd < -bound and self._counts[kind] <= FEW_STEPS:
            # The earlier steps were delayed.
            covariance[index, index] += UNKNOWN**2
        elif abs(odd) <= bound:
            self._odd = None
        elif self._odd is not None and self._odd[0] == kind and self._odd[1] * odd > 0:
            has_changed = min(abs(odd), abs(self._odd[1])) > MAX_LEAP
            if has_changed:
                covariance[index, index] += odd**2
            else:
                covariance += odd**2
            self._odd = None
            self._outdated.update(self._indices)
        else:
            self._odd = kind, odd
            odd = math.copysign(bound, odd)
        self._outdated.discard(kind)
        column = covariance[:, index].copy()
        gain = column / (column[index] + NOISE**2)
        self._times = self._times + odd * gain
        self._covariance = covariance - np.outer(gain, column)
        return has_changed
