"""Chooses the share of a step's drafts that is verified, for each depth and batch class."""

from __future__ import annotations

import math
from collections.abc import Iterable

from decoding.controllers.acceptance_rates import AcceptanceRates
from decoding.controllers.base import batch_class
from decoding.controllers.row_gains import RowGains
from decoding.controllers.step_times import StepTimeModel

SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
NODE_STEP = 4
"""Nodes of a step that verifies some of the drafts are a multiple of this, so that few shapes occur."""


def round_drafts(num_drafts: float, num_active: int) -> int:
    """Round a number of drafts up so that roots and drafts of `num_active` rows are a multiple of `NODE_STEP`."""
    return math.ceil((num_active + num_drafts) / NODE_STEP) * NODE_STEP - num_active


class DraftShares:
    """The chosen shares, and the speed of steps with any share. All drafts are verified until drafts are added to
    `gains`.

    `max_drafts` is the number of drafts of a tree with `max_levels` levels; a tree with fewer has its part of them.
    """

    def __init__(self, step_times: StepTimeModel, rates: AcceptanceRates, max_levels: int, max_drafts: int) -> None:
        self.gains = RowGains()
        self.max_drafts = max_drafts
        self._step_times, self._rates, self._max_levels = step_times, rates, max_levels
        self._chosen: dict[tuple[int, int], float] = {}

    def of(self, num_active: int, levels: int) -> float:
        """Return the share for a batch class and depth."""
        return self._chosen.get((batch_class(num_active), levels), 1.0)

    def choose(self, num_active: int, levels: int) -> tuple[int | None, float]:
        """Return the number of drafts to verify over all rows, None for all of them, and their share."""
        share, num_all = self.of(num_active, levels), num_active * self.max_drafts * levels / self._max_levels
        num_drafts = round_drafts(share * num_all, num_active)
        return (None, 1.0) if share == 1.0 or num_drafts >= num_all else (num_drafts, share)

    def speed(self, num_active: int, levels: int, share: float) -> float:
        """Return the expected tokens per second of steps without prefill."""
        # Levels that no recent step had are estimated by the acceptance rates.
        known = min(levels, self.gains.depth)
        tokens = self.gains.tokens(known, share) + share * (self._rates.tokens(levels) - self._rates.tokens(known))
        return num_active * tokens / self._step_times.seconds(num_active, levels, share)

    def review(self, num_active: int, depths: Iterable[int], min_gain: float) -> None:
        """Change the shares of these depths to the best ones, if their relative gain exceeds `min_gain`."""
        self.gains.refresh()
        if not self.gains.depth:
            return
        for levels in depths:
            if not self._step_times.num_measured(num_active, levels):
                continue  # a depth is first measured with all drafts
            speeds = {share: self.speed(num_active, levels, share) for share in SHARES}
            best, present = max(speeds, key=speeds.__getitem__), self.of(num_active, levels)
            if speeds[best] > (1.0 + min_gain) * speeds[present]:
                self._chosen[batch_class(num_active), levels] = best
