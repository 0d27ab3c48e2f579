"""What every kind of step takes at the machine's present pace, those that have not been run for long among them.

Machines become faster and slower: others use them too, clocks follow the heat, texts grow longer. That concerns all
kinds alike, so what is seen of those that are run has to be believed of those that are not. A Kalman filter (Kalman
1960, "A New Approach to Linear Filtering and Prediction Problems") over the logarithms of all kinds' times: together
they walk, and may leap; each by itself hardly changes. So two kinds are compared by when one was run soon after the
other, however long ago that was. Host numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

NOISE = 0.05
"""Standard deviation of one step's logarithm; those below are of logarithms too."""
PACE_WALK, OWN_WALK = 0.03, 0.004
"""By how much all kinds' times change together from step to step, and one kind's by itself."""
UNKNOWN = 100.0
"""What is known of a kind beforehand: nothing."""
OUTLIER = 3.0
"""Deviations beyond which a step is believed only as far as that; with the second in a row on the same side something
has changed at once."""
MOST_LEAP = math.log(2.0)
"""How far the pace may leap; what changes by more is a kind's own time."""
FEW_STEPS = 3
"""So many steps of a kind may all have been held up by something."""


class StepPaces:
    """Follows the times of all kinds of steps, from those that are run."""

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._times = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        # The step before, where it was an outlier: its kind, and by how much.
        self._odd: tuple[Hashable, float] | None = None
        # Kinds that were seen last before something changed at once.
        self._unsettled: set[Hashable] = set()

    def count(self, kind: Hashable) -> int:
        """Steps of this kind that were seen."""
        return self._counts.get(kind, 0)

    def log_seconds(self, kind: Hashable) -> float:
        """The logarithm of what a step of this kind would take now; it has to have been seen."""
        return float(self._times[self._places[kind]])

    def is_settled(self, kind: Hashable) -> bool:
        """Whether nothing has changed at once since this kind was seen; what may be the pace is taken for it."""
        return kind not in self._unsettled

    def forget(self, kind: Hashable) -> None:
        """As if no step of this kind had been seen."""
        place = self._places.pop(kind)
        self._places = {other: at - (at > place) for other, at in self._places.items()}
        del self._counts[kind]
        self._unsettled.discard(kind)
        self._times = np.delete(self._times, place)
        self._covariance = np.delete(np.delete(self._covariance, place, axis=0), place, axis=1)

    def add(self, kind: Hashable, log_seconds: float) -> bool:
        """Take one step's time; says whether this kind's own time is found to have changed at once."""
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
            # Those before were held up: clocks err upwards.
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
            self._unsettled.update(self._places)
        else:
            self._odd = kind, odd
            odd = math.copysign(bound, odd)
        self._unsettled.discard(kind)
        column = known[:, place].copy()
        gain = column / (column[place] + NOISE**2)
        self._times = self._times + odd * gain
        self._covariance = known - np.outer(gain, column)
        return has_changed
