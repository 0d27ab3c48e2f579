"""Statistics of a trial of methods: engine time per sample, fitted over blocks of rows.

All candidates return the same tokens, so the time of a sample is its admission time plus its token count times the time
per token. This module computes the fit over all blocks and the confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.choice import Standing

FULL_SHARE = 0.9
"""A step counts when so many of the rows are in slots that were there at most."""
FAR_OFF = 8.0
"""A step does not count that is late by so many times what steps are off in the median: something else held it up."""
MIN_TRIMMED_STEPS = 20
"""Steps from which on a block may have such."""
NUM_REFITS = 3
LEAST_OFF_S = 1e-9
LEAST_NOISE = 0.005
"""Deviation of the logarithm of one block's time; few blocks may agree better by chance."""
# Student's t for 95 %, by degrees of freedom; beyond the table, the next smaller one in it.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
T_95 |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}


@dataclass(frozen=True)
class Step:
    """One step of an engine: its seconds, the rows that were in slots, and how many of them had just come in."""

    seconds: float
    num_active: int
    num_admitted: int


@dataclass(frozen=True)
class Row:
    """A row with a text: its tokens after the first, its steps, and how many rows were in slots at them on average."""

    num_tokens: int
    num_steps: int
    num_beside: float = 0.0


@dataclass(frozen=True)
class Block:
    """What one candidate took in one round: seconds to admit a row, and for each of its further tokens."""

    candidate: str
    round: int
    admit_s: float
    token_s: float
    acceptance_length: float
    """Tokens per step of a row, the bonus token included."""
    num_rows: int

    def sample_s(self, tokens_per_sample: float) -> float:
        """Engine seconds of one sample that draws so many tokens after its first."""
        return self.admit_s + tokens_per_sample * self.token_s


@dataclass
class Recorder:
    """Gathers one block: steps as they are made, and rows as they finish."""

    candidate: str
    round: int
    by_load: bool = False
    """Whether the candidate's drafts depend on how many rows there are, so that only rows among many count."""
    num_submitted: int = 0
    rows: list[Row] = field(default_factory=list)
    is_over: bool = False
    """Whether the block is complete; set by the caller."""
    steps: list[Step] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows without the first of each row, which the prefill returns."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step of a row."""
        rows = self.rows
        if self.by_load:
            least = FULL_SHARE * max((row.num_beside for row in rows), default=0.0)
            rows = [row for row in rows if row.num_beside >= least]
        num_steps = sum(row.num_steps for row in rows)
        return sum(row.num_tokens for row in rows) / num_steps if num_steps else 1.0

    @property
    def num_full_steps(self) -> int:
        """Steps that count."""
        return len(self._full())

    def block(self) -> Block | None:
        """The measure of this block; None where no row or no step can be counted."""
        steps = self._full()
        if not steps or not self.rows:
            return None
        step_s, admit_s = fit_steps(steps)
        if not any(step.num_admitted for step in steps):  # all rows came in at once
            first = self.steps[0]
            admit_s = max(0.0, first.seconds - step_s) / max(1, first.num_admitted)
        num_active = float(np.mean([step.num_active for step in steps]))
        length = self.acceptance_length
        token_s = step_s / num_active / length if self.num_tokens else 0.0
        return Block(self.candidate, self.round, admit_s, token_s, length, len(self.rows))

    def _full(self) -> list[Step]:
        """Steps with as many rows as there ever were; not the first one, which prepares what all others use."""
        most = max((step.num_active for step in self.steps), default=0)
        later = self.steps[1:] or self.steps
        return [step for step in later if step.num_active >= FULL_SHARE * most]


def fit_steps(steps: Sequence[Step]) -> tuple[float, float]:
    """Seconds of a step without admission, and of admitting one row, by least squares over `steps`.

    If every step admits the same number of rows, the two are not identifiable; only their sum is then correct.
    """
    seconds = np.asarray([step.seconds for step in steps])
    factors = np.asarray([[1.0, step.num_admitted] for step in steps])
    found = np.linalg.lstsq(factors, seconds, rcond=None)[0]
    for _ in range(NUM_REFITS if len(steps) >= MIN_TRIMMED_STEPS else 0):
        over = seconds - factors @ found
        kept = over <= FAR_OFF * np.median(np.abs(over)) + LEAST_OFF_S
        found = np.linalg.lstsq(factors[kept], seconds[kept], rcond=None)[0]
    return max(0.0, float(found[0])), max(0.0, float(found[1]))


class Comparison:
    """Blocks of all candidates, fitted as candidate × round: what changes for all of them between rounds cancels.

    log(seconds) = a[candidate] + b[round] + noise, by least squares; candidates may have left after any round.
    """

    def __init__(self, blocks: Sequence[Block], tokens_per_sample: float) -> None:
        self.blocks = tuple(blocks)
        self.names = tuple(dict.fromkeys(block.candidate for block in blocks))
        rounds = sorted({block.round for block in blocks})
        values = np.log([max(block.sample_s(tokens_per_sample), 1e-12) for block in blocks])
        factors = np.zeros((len(blocks), len(self.names) + len(rounds) - 1))
        for row, block in enumerate(blocks):
            factors[row, self.names.index(block.candidate)] = 1.0
            if block.round == rounds[-1]:  # round effects add up to zero
                factors[row, len(self.names) :] = -1.0
            else:
                factors[row, len(self.names) + rounds.index(block.round)] = 1.0
        found, _, rank, _ = np.linalg.lstsq(factors, values, rcond=None)
        self._effects = found[: len(self.names)]
        self._spread = np.linalg.pinv(factors.T @ factors)[: len(self.names), : len(self.names)]
        freedom = len(blocks) - int(rank)
        self._width = math.inf
        if freedom > 0:
            noise = float(np.sum((values - factors @ found) ** 2)) / freedom
            self._width = _student(freedom) * max(LEAST_NOISE, math.sqrt(noise))

    @property
    def best(self) -> str:
        """The candidate with the fewest seconds."""
        return self.names[int(np.argmin(self._effects))]

    def slowdown(self, name: str) -> float:
        """How many times the best one's time this candidate takes."""
        return math.exp(self._contrast(name)[0])

    def is_slower(self, name: str) -> bool:
        """Whether the confidence interval of the difference to the best method is above zero."""
        difference, margin = self._contrast(name)
        return difference > 0 and difference - margin > 0

    def standing(self, name: str, note: str = "") -> Standing:
        """A candidate's time with its interval, and what its blocks saw."""
        place = self.names.index(name)
        own = [block for block in self.blocks if block.candidate == name]
        value = math.exp(self._effects[place])
        low = high = None
        if math.isfinite(self._width):
            margin = self._width * math.sqrt(max(0.0, self._spread[place, place]))
            low, high = value * math.exp(-margin), value * math.exp(margin)
        num_rows = sum(block.num_rows for block in own)
        length = sum(block.acceptance_length * block.num_rows for block in own) / num_rows
        return Standing(name, value, low, high, length, num_rows, note)

    def _contrast(self, name: str) -> tuple[float, float]:
        """The difference of the logarithms to the best one, and the half width of its interval."""
        place, best = self.names.index(name), self.names.index(self.best)
        if place == best:
            return 0.0, 0.0
        spread = self._spread[place, place] + self._spread[best, best] - 2 * self._spread[place, best]
        difference = float(self._effects[place] - self._effects[best])
        return difference, self._width * math.sqrt(max(0.0, spread)) if math.isfinite(self._width) else math.inf


def acceptance_band(blocks: Sequence[Block], name: str, least_share: float) -> tuple[float, float]:
    """The acceptance lengths that a candidate's blocks lead one to expect: three deviations, and `least_share` at
    least."""
    lengths = np.asarray([block.acceptance_length for block in blocks if block.candidate == name])
    middle = float(lengths.mean())
    deviation = float(lengths.std(ddof=1)) if len(lengths) > 1 else 0.0
    reach = max(least_share * middle, 3 * deviation)
    return middle - reach, middle + reach


def _student(freedom: int) -> float:
    return T_95[max(known for known in T_95 if known <= freedom)]
