"""Goodput controller: chooses the depth with the most expected tokens per second, or no drafts.

With k levels and n rows, a step yields n · (1 + Σ_{i ≤ k} S_i) tokens in T(n, k) seconds. S_i is the probability of at
least i accepted drafts (`acceptance_rates`), T the step-time model (`step_times`); tokens / T is the goodput of Liu et
al. 2024 (arXiv 2406.14066). In a full batch, the time of the drafter's prompt prefill per generated token is added. In
a draining batch, only the prefill and catch-up of the current rows are added.

The first steps measure plain decoding, the full depth, half of it, and plain decoding again. A batch class larger than
all before is measured with plain decoding and its estimated best depth, a smaller one with the next larger depth.
Later, other depths are tried for a few steps. Trials take at most the share `max_exploration` of steps and time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from decoding.controllers.acceptance_rates import AcceptanceRates
from decoding.controllers.base import Controller, DepthChoice, Reason, StepOutcome, batch_class
from decoding.controllers.step_times import PrefillTimeModel, StepTimeModel

LADDER = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Depths that are compared, in addition to the tree's maximum depth."""
START_STEPS = 3
"""Steps of each initial measurement; the first may include compilation and is ignored."""
MAX_START_STEPS = 8
"""Maximum steps of an initial measurement while no step was usable because the number of rows changed in each step."""
TRIAL_STEPS = 4
CHECK_STEPS = 2
"""Steps of the previous depth after a trial that changed the best depth, to detect a change of machine speed."""
FIRST_REVIEW_STEPS, REVIEW_STEPS = 2, 16
"""Steps between reviews of the best depth: right after a new measurement, and the maximum."""
MIN_GAIN = 0.03
"""Minimum relative gain of goodput for a change of depth."""
FIRST_PAUSE_STEPS, LAST_PAUSE_STEPS = 64, 4096
"""Steps between two trials of the same depth; the first value doubles with each trial up to the second."""
HOPE = 0.25
"""Relative bonus on the estimated goodput of depths that were never measured."""


@dataclass
class _Trial:
    levels: int
    num_steps: int
    reason: Reason
    num_done: int = 0


class GoodputController(Controller):
    """Controller that chooses the depth with the best goodput among `LADDER` and `max_levels`."""

    can_be_off = True

    def __init__(self, max_levels: int, max_exploration: float = 0.01) -> None:
        assert max_levels >= 1, max_levels
        assert 0.0 <= max_exploration < 1.0, max_exploration
        self.max_exploration = max_exploration
        self.depths = tuple(sorted({*(depth for depth in LADDER if depth < max_levels), max_levels}))
        self.step_times = StepTimeModel()
        self.rates = AcceptanceRates()
        self.prefill_times = PrefillTimeModel()
        self.num_steps = 0
        self.num_start_steps = 0
        self.num_explored_steps = 0
        self.spent_s = 0.0
        self.explored_s = 0.0
        """Seconds of trials in excess of the expected seconds of the same tokens at the best depth."""
        half = self.depths[len(self.depths) // 2]
        # Plain decoding is measured twice, to detect a change of machine speed.
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

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> DepthChoice:
        if max_levels == 0:
            return DepthChoice(0, "last")
        self._resume_s = self._catch_up_s(num_missed) + self.prefill_times.prefill_s_of(num_unread)
        levels, reason = self._pick(num_active)
        levels = max(depth for depth in self.depths if depth <= min(levels, max_levels))
        if reason == "best" and levels < self._current[batch_class(num_active)]:
            # Outputs end before the best depth: choose the best of the smaller depths.
            speeds = self._speeds(num_active)
            levels = max((depth for depth in self.depths if depth <= max_levels), key=speeds.__getitem__)
        promised = plain = 0.0
        if self.step_times.is_fitted:
            promised, plain = self.speed(num_active, levels), self.speed(num_active, 0)
        return DepthChoice(levels, reason, promised, plain)

    def speed(self, num_active: int, levels: int) -> float:
        """Return the expected goodput in tokens per second, summed over rows, with the drafter's prefill."""
        seconds = 1.0 / self._step_speed(num_active, levels)
        if levels:
            is_full = batch_class(num_active) >= self._largest_begun
            num_tokens = self.prefill_times.remaining_tokens(num_active)
            seconds += self.prefill_times.seconds_per_token if is_full else self._resume_s / num_tokens
        return 1.0 / seconds

    def _step_speed(self, num_active: int, levels: int) -> float:
        """Return the expected tokens per second of steps without prefill."""
        return num_active * self.rates.tokens(levels) / self.step_times.seconds(num_active, levels)

    def learn(self, outcome: StepOutcome, choice: DepthChoice) -> None:
        reason = choice.reason
        self.prefill_times.add(outcome.prefill, outcome.num_tokens, outcome.ended)
        if reason == "last":
            # Plain decoding of the last tokens; its time is a valid measurement.
            self.step_times.add(outcome.num_active, 0, outcome.seconds)
            return
        self.num_steps += 1
        self.spent_s += outcome.seconds + outcome.prefill.seconds
        self.rates.add(outcome.accepted, outcome.offered)
        is_usual = not (outcome.num_missed or outcome.is_late)
        self.step_times.add(outcome.num_active, outcome.levels, outcome.seconds, is_usual)
        self.num_start_steps += reason == "start"
        more_s = 0.0
        if outcome.num_missed and self.step_times.num_measured(outcome.num_active, outcome.levels):
            more_s = max(0.0, outcome.seconds - self.step_times.seconds(outcome.num_active, outcome.levels))
            self._catch_ups.append((outcome.num_missed, more_s))
        if reason == "explore":
            self.num_explored_steps += 1
            best = max(self._step_speed(outcome.num_active, depth) for depth in self.depths)
            self.explored_s += max(0.0, outcome.seconds - outcome.num_tokens / best)
            if not self._current[batch_class(outcome.num_active)]:
                # While drafting is off, prompts are prefilled only for the trial.
                self.explored_s += outcome.prefill.seconds
        elif self._was_trial:
            # After a trial of plain decoding, the drafter runs the trial's tokens.
            self.explored_s += more_s
        self._was_trial = reason == "explore"

    # --- deciding --------------------------------------------------------------------------------------------------

    def _pick(self, num_active: int) -> tuple[int, Reason]:
        size = batch_class(num_active)
        trial = self._trial
        if trial is not None and trial.reason == "explore" and size != self._size:
            trial = None
        self._size = size
        if trial is None and not self._start and not self.step_times.is_fitted:
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
        cannot_win = trial.reason == "start" and self._cannot_win(num_active, trial.levels)
        is_unmeasured = trial.reason == "start" and self.step_times.num_measured(num_active, trial.levels) == 0
        if cannot_win or trial.num_done >= (MAX_START_STEPS if is_unmeasured else trial.num_steps):
            self._trial = None
            self._next_review = self.num_steps
            self._review_pause = FIRST_REVIEW_STEPS
        return trial.levels, trial.reason

    def _begin_size(self, num_active: int, size: int) -> None:
        """Plan the first measurements of a batch class; see the module docstring."""
        guess = self._current[size]
        if size > self._largest_begun:
            if self._largest_begun:
                self._start.extend(dict.fromkeys((0, guess)))
            self._largest_begun = size
        else:
            self._measure_deeper(num_active, guess)

    def _measure_deeper(self, num_active: int, levels: int) -> None:
        """Plan one measurement of the next larger depth; with drafting off, only if it may be faster with prefill."""
        deeper = next((depth for depth in self.depths if depth > levels), None)
        if deeper is None or self.step_times.num_measured(num_active, deeper):
            return
        if levels or (1.0 + HOPE) * self.speed(num_active, deeper) > self.speed(num_active, 0):
            self._start.append(deeper)

    def _cannot_win(self, num_active: int, levels: int) -> bool:
        """Return whether a measured depth is slower than plain decoding even if every draft is accepted."""
        measured = all(self.step_times.num_measured(num_active, depth) for depth in (0, levels))
        if not measured:
            return False
        self.step_times.refresh()
        return self.step_times.seconds(num_active, levels) > (1 + levels) * self.step_times.seconds(num_active, 0)

    def _speeds(self, num_active: int) -> dict[int, float]:
        return {depth: self.speed(num_active, depth) for depth in self.depths}

    def _review(self, num_active: int, size: int) -> None:
        """Change to the best depth if its gain exceeds `MIN_GAIN`."""
        self.step_times.refresh()
        speeds = self._speeds(num_active)
        best = max(speeds, key=speeds.__getitem__)
        present = self._current.get(size)
        if present is None or speeds[best] > (1.0 + MIN_GAIN) * speeds[present]:
            self._current[size] = best
            if present is not None and best > present and size < self._largest_begun:
                self._measure_deeper(num_active, best)
            if present is not None:
                # Other depths may be worth a trial sooner.
                self._pauses = {key: value for key, value in self._pauses.items() if key[0] != size}

    def _next_trial(self, num_active: int, size: int) -> _Trial | None:
        """Return a trial of the most promising depth that is due and within the exploration budget, else None."""
        if self.num_explored_steps + TRIAL_STEPS + CHECK_STEPS > self.max_exploration * self.num_steps:
            return None
        speeds, present = self._speeds(num_active), self._current[size]
        hopes = {
            depth: speed * (1.0 + (HOPE if self.step_times.num_measured(num_active, depth) == 0 else 0.0))
            for depth, speed in speeds.items()
            if depth != present and self.num_steps >= self._pauses.get((size, depth), (0, 0))[0]
        }
        if present and not self.step_times.is_current(num_active, 0):
            # Drafting or the whole machine became slower; a trial of plain decoding distinguishes the two.
            hopes[0] = math.inf
        for depth in sorted(hopes, key=hopes.__getitem__, reverse=True):
            worth = self._step_speed(num_active, depth) / self._step_speed(num_active, present)
            cost_s = TRIAL_STEPS * self.step_times.seconds(num_active, depth) * max(0.0, 1.0 - worth)
            if depth and not present:
                cost_s += self._resume_s
            if self.explored_s + cost_s <= self.max_exploration * self.spent_s:
                pause = 2 * self._pauses.get((size, depth), (0, FIRST_PAUSE_STEPS // 2))[1]
                pause = min(pause, LAST_PAUSE_STEPS)
                self._pauses[size, depth] = (self.num_steps + pause, pause)
                if not present:
                    # While drafting was off, the acceptance rates were not updated.
                    self.rates.fade()
                return _Trial(depth, TRIAL_STEPS, "explore")
        return None

    def _catch_up_s(self, num_missed: int) -> float:
        """Return the expected seconds to run `num_missed` tokens: the nearest measurement, scaled up if larger."""
        if not self._catch_ups or not num_missed:
            return 0.0
        nearest, seconds = min(self._catch_ups, key=lambda measurement: abs(measurement[0] - num_missed))
        return seconds * max(1.0, num_missed / nearest)
