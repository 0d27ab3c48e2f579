"""Estimates acceptance rates by depth: the probability that a row accepts at least i drafts.

Rates are conditional on acceptance at the previous depth; the prior of each depth is the rate of the previous depth.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY_TRIALS = 400.0
"""Time constant of the exponential decay, in offers at a depth."""
MIN_TRIALS = 64.0
"""Counts do not decay below this many offers, to limit noise."""
FIRST_RATE = 0.6
"""Prior acceptance rate of the first draft."""
BELIEF_TRIALS = 4.0
"""Weight of the prior, in offers: `FIRST_RATE` at depth 1, else the rate of the previous depth."""


class AcceptanceRates:
    """Decaying counts, by depth, of offers (drafts whose ancestors were all accepted) and of acceptances."""

    def __init__(self) -> None:
        self._offers: list[float] = []
        self._takes: list[float] = []

    def add(self, accepted: Sequence[int], offered: Sequence[int]) -> None:
        """Add one step: per row, the number of accepted drafts and the depth of the deepest useful draft."""
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
        """Halve the counts, but not below `MIN_TRIALS` offers, so that new counts weigh more."""
        for depth, offers in enumerate(self._offers):
            if offers > MIN_TRIALS:
                keep = max(0.5, MIN_TRIALS / offers)
                self._offers[depth] *= keep
                self._takes[depth] *= keep

    def tokens(self, levels: int) -> float:
        """Return the expected tokens of a row in a step with `levels` levels: 1 + Σ P(at least i accepted)."""
        total = survival = 1.0
        rate = FIRST_RATE
        for depth in range(levels):
            offers, takes = (self._offers[depth], self._takes[depth]) if depth < len(self._offers) else (0.0, 0.0)
            rate = (takes + BELIEF_TRIALS * rate) / (offers + BELIEF_TRIALS)
            survival *= rate
            total += survival
        return total
