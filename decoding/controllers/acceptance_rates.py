"""How likely a row accepts at least i drafts, followed step by step.

Kept as conditional rates by depth, so that a depth that was seldom offered is judged by the one before it. Host numbers
only.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY_TRIALS = 400.0
"""Offers of a depth that count: older ones fade."""
LEAST_TRIALS = 64.0
"""Below so many offers counts do not fade: chance would rule."""
FIRST_RATE = 0.6
"""What is believed of the first draft before anything was seen."""
BELIEF_TRIALS = 4.0
"""Offers that such a belief, or a shallower depth's rate, is worth."""


class DepthRates:
    """Per depth: fading counts of offers (drafts whose ancestors were all accepted) and of acceptances."""

    def __init__(self) -> None:
        self._offers: list[float] = []
        self._takes: list[float] = []

    def add(self, accepted: Sequence[int], offered: Sequence[int]) -> None:
        """Follow one step: row by row, how many drafts were accepted and the deepest that the row had a use for."""
        for depth in range(1, max(offered, default=0) + 1):
            offers = takes = 0
            for taken, most in zip(accepted, offered, strict=True):
                if most >= depth and taken >= depth - 1:
                    offers += 1
                    takes += taken >= depth
            if depth > len(self._offers):
                self._offers.append(0.0)
                self._takes.append(0.0)
            if offers:
                keep = (1.0 - 1.0 / MEMORY_TRIALS) ** offers
                self._offers[depth - 1] = keep * self._offers[depth - 1] + offers
                self._takes[depth - 1] = keep * self._takes[depth - 1] + takes

    def fade(self) -> None:
        """Believe old counts half as much, so that what comes next can change what they say."""
        for depth, offers in enumerate(self._offers):
            if offers > LEAST_TRIALS:
                keep = max(0.5, LEAST_TRIALS / offers)
                self._offers[depth] *= keep
                self._takes[depth] *= keep

    def tokens(self, levels: int) -> float:
        """Tokens that a row is expected to get from a step with so many levels: 1 + Σ P(at least i accepted)."""
        total = survival = 1.0
        rate = FIRST_RATE
        for depth in range(levels):
            offers, takes = (self._offers[depth], self._takes[depth]) if depth < len(self._offers) else (0.0, 0.0)
            rate = (takes + BELIEF_TRIALS * rate) / (offers + BELIEF_TRIALS)
            survival *= rate
            total += survival
        return total
