"""The controller that decides by measurement: as deep as promises the most tokens per second, and off where that is 0.

For k levels and n rows a step gives n · (1 + Σ_{i ≤ k} S_i) tokens, S_i the share of rows that accept at least i drafts
(`decoding.controllers.acceptance_rates`), in T(n, k) seconds (`decoding.controllers.step_times`). Whole steps are what
is compared, since a device's phases are not what the host's clock sees of them. Liu et al. 2024 (arXiv 2406.14066) call
the quotient goodput. Whoever drafts at all also reads every prompt for it: its seconds per token made
(`decoding.controllers.prefill_times`) come on top while the batch is full. In one that drains no prompts follow: there
only what a resting drafter has to read and to catch up on counts, over the tokens that are left.

Nothing is known at first, so the first steps measure: plain, as deep as the tree goes, half as deep, and plain once
more; a larger batch than any before is measured plain and at its estimated best, a smaller one a little deeper than
that. Later on, depths that were not measured, or not for long, are tried for a few steps at a time, plain decoding and
the drafter at rest among them. All trials together take at most `max_exploration` of the steps, and cost at most that
share of the time; what a trial costs is its time beyond what its tokens take at the best depth, the drafter's catching
up included. So a drafter at rest is tried again less and less often, and an expensive one more seldom. A machine that
becomes slower does so for all depths (`decoding.controllers.pace_filter`): a depth that a trial made the best is
checked by the one before, and where only drafts were run when steps became slower, plain decoding is tried first.

Knows no tensors and no clock: times come with the outcomes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from decoding.controllers.acceptance_rates import DepthRates
from decoding.controllers.base import Choice, Outcome, Reason, batch_class
from decoding.controllers.prefill_times import PromptCosts
from decoding.controllers.step_times import StepCosts

LADDER = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Depths that are compared, with the tree's own: neighbours differ too little to be worth a shape each."""
START_STEPS = 3
"""Steps of each depth at the start; the first may compile something and is not counted."""
MOST_START_STEPS = 8
"""As long as none was counted, because every step had another number of rows."""
TRIAL_STEPS = 4
CHECK_STEPS = 2
"""Of the depth before, after a trial that made another one the best: the machine may just have become faster."""
FIRST_REVIEW_STEPS, REVIEW_STEPS = 2, 16
"""Steps between two looks at what is best, right after something new was measured and in the long run."""
MIN_GAIN = 0.03
"""By how much a depth has to be better than the present one to take its place."""
FIRST_PAUSE_STEPS, LAST_PAUSE_STEPS = 64, 4096
"""Between two trials of a depth that did not prove better; doubled each time."""
HOPE = 0.25
"""How much better than estimated a depth may be that was never measured."""


@dataclass
class _Trial:
    levels: int
    num_steps: int
    reason: Reason
    num_done: int = 0


class Measured:
    """Chooses among the depths of `LADDER` up to `max_levels`; see the module for how."""

    can_be_off = True

    def __init__(self, max_levels: int, max_exploration: float = 0.01) -> None:
        assert max_levels >= 1, max_levels
        assert 0.0 <= max_exploration < 1.0, max_exploration
        self.max_exploration = max_exploration
        self.depths = tuple(sorted({*(depth for depth in LADDER if depth < max_levels), max_levels}))
        self.costs = StepCosts()
        self.rates = DepthRates()
        self.prompts = PromptCosts()
        self.num_steps = 0
        self.num_start_steps = 0
        self.num_explored_steps = 0
        self.spent_s = 0.0
        self.explored_s = 0.0
        """What trials cost beyond what their tokens would have taken."""
        half = self.depths[len(self.depths) // 2]
        # Plainly once more at the end, lest it was the machine that changed.
        self._start = deque([*dict.fromkeys((0, max_levels, half)), 0])
        self._largest_begun = 0
        self._trial: _Trial | None = None
        self._current: dict[int, int] = {}
        self._pauses: dict[tuple[int, int], tuple[int, int]] = {}
        self._next_review = 0
        self._review_pause = FIRST_REVIEW_STEPS
        self._catch_ups: deque[tuple[int, float]] = deque(maxlen=8)
        self._resume_s = 0.0
        self._size = 0
        self._was_trial = False
        self._was_check = False

    @property
    def is_off(self) -> bool:
        return self._trial is None and not self._start and self._current.get(self._size) == 0

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        if max_levels == 0:
            return Choice(0, "last")
        self._resume_s = self._catch_up_s(num_missed) + self.prompts.read_s(num_unread)
        levels, reason = self._pick(num_active)
        levels = max(depth for depth in self.depths if depth <= min(levels, max_levels))
        if reason == "best" and levels < self._current[batch_class(num_active)]:
            # Cut by the texts' ends: what is best among the shallower ones is another question.
            speeds = self._speeds(num_active)
            levels = max((depth for depth in self.depths if depth <= max_levels), key=speeds.__getitem__)
        promised = plain = 0.0
        if self.costs.knows_any:
            promised, plain = self.speed(num_active, levels), self.speed(num_active, 0)
        return Choice(levels, reason, promised, plain)

    def speed(self, num_active: int, levels: int) -> float:
        """Expected tokens per second of all rows together."""
        seconds = 1.0 / self._step_speed(num_active, levels)
        if levels:
            is_full = batch_class(num_active) >= self._largest_begun
            left = self.prompts.num_left(num_active)
            seconds += self.prompts.seconds_per_token if is_full else self._resume_s / left
        return 1.0 / seconds

    def _step_speed(self, num_active: int, levels: int) -> float:
        """Tokens per second of the steps alone."""
        return num_active * self.rates.tokens(levels) / self.costs.seconds(num_active, levels)

    def learn(self, outcome: Outcome, choice: Choice) -> None:
        reason = choice.reason
        self.prompts.add(outcome.reading, outcome.num_tokens, outcome.ended)
        if reason == "last":
            # Plain decoding, but of rows that end: measured like any.
            self.costs.add(outcome.num_active, 0, outcome.seconds)
            return
        self.num_steps += 1
        self.spent_s += outcome.seconds + outcome.reading.seconds
        self.rates.add(outcome.accepted, outcome.offered)
        self.costs.add(
            outcome.num_active, outcome.levels, outcome.seconds, is_usual=not (outcome.num_missed or outcome.is_late)
        )
        self.num_start_steps += reason == "start"
        more_s = 0.0
        if outcome.num_missed and self.costs.num_measured(outcome.num_active, outcome.levels):
            more_s = max(0.0, outcome.seconds - self.costs.seconds(outcome.num_active, outcome.levels))
            self._catch_ups.append((outcome.num_missed, more_s))
        if reason == "explore":
            self.num_explored_steps += 1
            best = max(self._step_speed(outcome.num_active, depth) for depth in self.depths)
            self.explored_s += max(0.0, outcome.seconds - outcome.num_tokens / best)
            if not self._current[batch_class(outcome.num_active)]:
                # Nobody would have read them; while drafts are the rule they are read anyway.
                self.explored_s += outcome.reading.seconds
        elif self._was_trial:
            # What a trial without drafts left to be caught up on.
            self.explored_s += more_s
        self._was_trial = reason == "explore"

    # --- deciding --------------------------------------------------------------------------------------------------

    def _pick(self, num_active: int) -> tuple[int, Reason]:
        size = batch_class(num_active)
        trial = self._trial
        if trial is not None and trial.reason == "explore" and size != self._size:
            trial = None
        self._size = size
        if trial is None and not self._start and not self.costs.knows_any:
            return self.depths[-1], "start"
        if trial is None and not self._start and size not in self._current:
            self._review(num_active, size)
            self._begin_size(num_active, size)
        if trial is None and self._start:
            trial = _Trial(self._start.popleft(), START_STEPS, "start")
        if trial is None and (self.num_steps >= self._next_review or size not in self._current):
            former = self._current.get(size)
            self._review(num_active, size)
            self._next_review = self.num_steps + self._review_pause
            self._review_pause = min(2 * self._review_pause, REVIEW_STEPS)
            if former not in (None, self._current[size]) and self._was_trial and not self._was_check:
                trial, self._was_check = _Trial(former, CHECK_STEPS, "explore"), True
            else:
                trial, self._was_check = self._next_trial(num_active, size), False
        self._trial = trial
        if trial is None:
            return self._current[size], "best"
        trial.num_done += 1
        is_hopeless = trial.reason == "start" and self._is_hopeless(num_active, trial.levels)
        is_unmeasured = trial.reason == "start" and self.costs.num_measured(num_active, trial.levels) == 0
        if is_hopeless or trial.num_done >= (MOST_START_STEPS if is_unmeasured else trial.num_steps):
            self._trial = None
            self._next_review = self.num_steps
            self._review_pause = FIRST_REVIEW_STEPS
        return trial.levels, trial.reason

    def _begin_size(self, num_active: int, size: int) -> None:
        """What to measure at a size that is new: plain and the best guess in a larger batch, where drafts may have
        stopped paying; in a smaller one the next deeper tree."""
        guess = self._current[size]
        if size > self._largest_begun:
            if self._largest_begun:
                self._start.extend(dict.fromkeys((0, guess)))
            self._largest_begun = size
        else:
            self._measure_deeper(num_active, guess)

    def _measure_deeper(self, num_active: int, levels: int) -> None:
        """A draining batch climbs: the next deeper tree is measured, once, as long as deeper ones prove better; by a
        drafter at rest only where what it has to read first may be worth it."""
        deeper = next((depth for depth in self.depths if depth > levels), None)
        if deeper is None or self.costs.num_measured(num_active, deeper):
            return
        if levels or (1.0 + HOPE) * self.speed(num_active, deeper) > self.speed(num_active, 0):
            self._start.append(deeper)

    def _is_hopeless(self, num_active: int, levels: int) -> bool:
        """Whether a depth would not pay even if every draft was accepted, so far as it was measured."""
        measured = all(self.costs.num_measured(num_active, depth) for depth in (0, levels))
        if not measured:
            return False
        self.costs.refresh()
        return self.costs.seconds(num_active, levels) > (1 + levels) * self.costs.seconds(num_active, 0)

    def _speeds(self, num_active: int) -> dict[int, float]:
        return {depth: self.speed(num_active, depth) for depth in self.depths}

    def _review(self, num_active: int, size: int) -> None:
        """Take the best depth, if it is better than the present one by more than the clock's noise."""
        self.costs.refresh()
        speeds = self._speeds(num_active)
        best = max(speeds, key=speeds.__getitem__)
        present = self._current.get(size)
        if present is None or speeds[best] > (1.0 + MIN_GAIN) * speeds[present]:
            self._current[size] = best
            if present is not None and best > present and size < self._largest_begun:
                self._measure_deeper(num_active, best)
            if present is not None:
                # The world has changed: others may be worth a trial sooner than was thought.
                self._pauses = {key: value for key, value in self._pauses.items() if key[0] != size}

    def _next_trial(self, num_active: int, size: int) -> _Trial | None:
        """The most hopeful depth that is due, if its trial can be afforded."""
        if self.num_explored_steps + TRIAL_STEPS + CHECK_STEPS > self.max_exploration * self.num_steps:
            return None
        speeds, present = self._speeds(num_active), self._current[size]
        hopes = {
            depth: speed * (1.0 + (HOPE if self.costs.num_measured(num_active, depth) == 0 else 0.0))
            for depth, speed in speeds.items()
            if depth != present and self.num_steps >= self._pauses.get((size, depth), (0, 0))[0]
        }
        if present and not self.costs.is_settled(num_active, 0):
            # It may have been drafts that became slower and not the machine: plain decoding knows.
            hopes[0] = math.inf
        for depth in sorted(hopes, key=hopes.__getitem__, reverse=True):
            worth = self._step_speed(num_active, depth) / self._step_speed(num_active, present)
            cost_s = TRIAL_STEPS * self.costs.seconds(num_active, depth) * max(0.0, 1.0 - worth)
            if depth and not present:
                cost_s += self._resume_s
            if self.explored_s + cost_s <= self.max_exploration * self.spent_s:
                pause = 2 * self._pauses.get((size, depth), (0, FIRST_PAUSE_STEPS // 2))[1]
                pause = min(pause, LAST_PAUSE_STEPS)
                self._pauses[size, depth] = (self.num_steps + pause, pause)
                if not present:
                    # Nothing was offered for long, and the texts may be others by now.
                    self.rates.fade()
                return _Trial(depth, TRIAL_STEPS, "explore")
        return None

    def _catch_up_s(self, num_missed: int) -> float:
        """What catching up on so many tokens is expected to take: as once did, and in proportion beyond that."""
        if not self._catch_ups or not num_missed:
            return 0.0
        known, seconds = min(self._catch_ups, key=lambda one: abs(one[0] - num_missed))
        return seconds * max(1.0, num_missed / known)
