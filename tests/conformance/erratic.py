"""A controller with arbitrary depths, off included, which must not change the output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from decoding import Method
from decoding.controllers.base import DepthChoice, StepOutcome


class Erratic:
    """Repeats the depths of `pattern`, or draws random ones without it; records its outcomes."""

    can_be_off = True

    def __init__(self, seed: int = 0, pattern: Sequence[int] = ()) -> None:
        self._random = random.Random(seed)
        self._pattern = tuple(pattern)
        self.num_asked = 0
        self.is_off = bool(pattern) and not any(pattern)
        self.outcomes: list[StepOutcome] = []
        self.most_missed = 0

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> DepthChoice:
        self.num_asked += 1
        if self._pattern:
            levels = min(max_levels, self._pattern[self.num_asked % len(self._pattern)])
        else:
            # Often off for several steps in a row, with all depths in between.
            rests = self.is_off and self._random.random() < 0.5
            levels = 0 if rests or self._random.random() < 0.25 else self._random.randint(0, max_levels)
        self.is_off = levels == 0
        self.most_missed = max(self.most_missed, num_missed)
        return DepthChoice(levels, "best" if max_levels else "last", 2.0, 1.0)

    def learn(self, outcome: StepOutcome, choice: DepthChoice) -> None:
        self.outcomes.append(outcome)


def unsettled(method: Method, seed: int = 0, pattern: Sequence[int] = ()) -> Method:
    """The method with this controller."""
    return replace(method, controller=Erratic(seed, pattern))
