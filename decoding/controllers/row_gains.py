"""Estimates the tokens of a step that verifies only the most promising drafts of all rows.

A draft's gain is the probability that its whole path is accepted. It is estimated from the drafter's confidence by
counting how often verified drafts of similar confidence were accepted. The next step is expected to have drafts of the
same confidences as recent steps, verified or not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
"""Limits of the classes of confidence."""
MEMORY_DRAFTS = 2000.0
"""Most drafts per class that are remembered; older ones decay."""
BELIEF_DRAFTS = 8.0
"""Weight of the prior, in drafts: the drafter's confidence is the probability of acceptance."""
RECENT_STEPS, KEPT_STEPS = 16, 128
"""Steps whose drafts are those of the next step, and steps that are kept to have some with deep trees among them."""
NOT_VERIFIED, REJECTED, ACCEPTED = -1, 0, 1


@dataclass(frozen=True)
class Drafts:
    """All drafts of one step of n rows, (n, N − 1) each: the drafter's confidence (0: no draft), the depth, and whether
    the draft was `ACCEPTED`, `REJECTED` or `NOT_VERIFIED`."""

    confidence: Floats
    depth: NDArray[np.int64]
    outcome: NDArray[np.int64]

    @property
    def num_levels(self) -> int:
        """Depth of the deepest draft."""
        return int(self.depth.max(initial=0))

    def verified_depths(self) -> list[int]:
        """Return the depth of the deepest verified draft of each row."""
        return [int(one) for one in np.where(self.outcome != NOT_VERIFIED, self.depth, 0).max(axis=1, initial=0)]


class RowGains:
    """Counts of accepted drafts by class of confidence, and the drafts of recent steps."""

    def __init__(self) -> None:
        middles = np.concatenate([EDGES, [1.0]]) / 2 + np.concatenate([[0.0], EDGES]) / 2
        self._priors = middles
        self._offers, self._takes = np.zeros(len(middles)), np.zeros(len(middles))
        self._recent: deque[Drafts] = deque(maxlen=KEPT_STEPS)
        self._tokens: dict[tuple[int, float], float] = {}

    @property
    def depth(self) -> int:
        """Largest depth among the drafts of recent steps; 0 without any."""
        return max((one.num_levels for one in self._recent), default=0)

    def add(self, drafts: Drafts) -> None:
        """Add the drafts of a step; they count for `tokens` after the next `refresh`."""
        self._recent.append(drafts)
        is_known = (drafts.outcome != NOT_VERIFIED) & (drafts.confidence > 0)
        classes = np.searchsorted(EDGES, drafts.confidence[is_known], side="right")
        taken = drafts.outcome[is_known] == ACCEPTED
        offers = np.bincount(classes, minlength=len(self._priors))
        keep = (1.0 - 1.0 / MEMORY_DRAFTS) ** offers
        self._offers = keep * self._offers + offers
        self._takes = keep * self._takes + np.bincount(classes[taken], minlength=len(self._priors))

    def refresh(self) -> None:
        """Use the drafts of the latest steps from now on."""
        self._tokens.clear()

    def gains(self) -> Floats:
        """Return the probability of acceptance of each class of confidence, not decreasing: classes out of order are
        pooled (isotonic regression)."""
        weights = self._offers + BELIEF_DRAFTS
        pools: list[tuple[float, float, int]] = []  # takes, offers, classes
        for takes, offers in zip(self._takes + BELIEF_DRAFTS * self._priors, weights, strict=True):
            pool = float(takes), float(offers), 1
            while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
                before = pools.pop()
                pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
            pools.append(pool)
        return np.repeat([takes / offers for takes, offers, _ in pools], [number for *_, number in pools])

    def tokens(self, levels: int, share: float) -> float:
        """Return the expected tokens of a row in a step that drafts `levels` levels and verifies `share` of the drafts:
        1 + the gains of the best ones, over all rows of recent steps."""
        key = min(levels, self.depth), share
        if key not in self._tokens:
            self._tokens[key] = self._expect(*key)
        return self._tokens[key]

    def _expect(self, levels: int, share: float) -> float:
        gains, num_rows, num_all = self.gains(), 0, 0
        found = []
        for one in [one for one in self._recent if one.num_levels >= levels][-RECENT_STEPS:]:
            is_draft = (one.confidence > 0) & (one.depth <= levels)
            found.append(one.confidence[is_draft])
            num_rows += one.confidence.shape[0]
            num_all += int((one.depth <= levels).sum())
        confidence = np.concatenate(found) if found else np.zeros(0)
        if not num_rows:
            return 1.0
        num_left = len(confidence) - round(share * num_all)
        if num_left > 0:
            confidence = np.sort(confidence)[num_left:]
        total = float(gains[np.searchsorted(EDGES, confidence, side="right")].sum())
        return 1.0 + total / num_rows
