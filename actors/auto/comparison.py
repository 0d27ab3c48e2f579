"""Computes the engine time per sample of each candidate of a trial, with confidence intervals, from blocks of rows.

All candidates return the same tokens; the time of a sample is its admission time plus its tokens times the token time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.results import CandidateResult, PhaseSeconds

FULL_SHARE = 0.9
"""A step counts if its number of active rows is at least this share of the block's maximum."""
FAR_OFF = 8.0
"""A step that exceeds the fit by more than this multiple of the median absolute deviation is an outlier."""
MIN_TRIMMED_STEPS = 20
"""Minimum number of steps from which outliers are removed."""
NUM_REFITS = 3
MIN_OFF_S = 1e-9
MIN_NOISE = 0.005
"""Lower bound of the standard deviation of a block's log time; few blocks may agree better by chance."""
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
T_95 |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}

NO_PHASES = PhaseSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Step:
    """One step of an engine: its seconds, the number of active rows, and the number of rows that it admitted."""

    seconds: float
    num_active: int
    num_admitted: int
    encode_s: float = 0.0
    """Seconds of the step in which prompts were encoded."""
    prefill_s: float = 0.0
    """Seconds of the step in which prompts were prefilled."""


@dataclass(frozen=True)
class TrialRow:
    """A decoded row: its tokens after the first, its steps, and the mean batch size of these steps."""

    num_tokens: int
    num_steps: int
    num_beside: float = 0.0


@dataclass(frozen=True)
class Block:
    """Times of one candidate in one round. `admit_s` are engine seconds to admit a row. `token_s` are engine seconds
    per token after a row's first, with the time of a step divided among its active rows, so it is not a latency."""

    candidate: str
    round: int
    admit_s: float
    token_s: float
    acceptance_length: float
    """Tokens per step of a row, the bonus token included."""
    num_rows: int
    phases: PhaseSeconds = NO_PHASES
    """Times as the engine reports them, with decoding per token. They are exact if every step admits the same number of
    rows, where the fit cannot separate `admit_s` from `token_s`."""

    def sample_s(self, tokens_per_sample: float) -> float:
        """Return the engine seconds of one sample with `tokens_per_sample` tokens after its first."""
        return self.admit_s + tokens_per_sample * self.token_s

    def sample_phases(self, tokens_per_sample: float) -> PhaseSeconds:
        """Return the engine seconds of one such sample by phase."""
        return replace(self.phases, decode_s=tokens_per_sample * self.phases.decode_s)


@dataclass
class BlockRecorder:
    """Records the steps and the finished rows of one block."""

    candidate: str
    round: int
    by_load: bool = False
    """Whether draft depths depend on the batch size, so that only rows at full slots count for acceptance."""
    num_submitted: int = 0
    rows: list[TrialRow] = field(default_factory=list)
    is_over: bool = False
    """Whether the block is complete; set by the caller."""
    steps: list[Step] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, excluding each row's first token, which the prefill returns."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step of a row, the bonus token included."""
        rows = self.rows
        if self.by_load:
            least = FULL_SHARE * max((row.num_beside for row in rows), default=0.0)
            rows = [row for row in rows if row.num_beside >= least]
        num_steps = sum(row.num_steps for row in rows)
        return sum(row.num_tokens for row in rows) / num_steps if num_steps else 1.0

    @property
    def num_full_steps(self) -> int:
        """Number of steps with at least `FULL_SHARE` of the block's largest batch. The first step is not counted,
        unless it is the only one."""
        return len(self._full())

    def block(self) -> Block | None:
        """Return the times of this block, or None if no row finished."""
        steps = self._full()
        if not steps or not self.rows:
            return None
        step_s, admit_s = fit_steps(steps)
        if not any(step.num_admitted for step in steps):  # all rows were admitted in the first step
            first = self.steps[0]
            admit_s = max(0.0, first.seconds - step_s) / max(1, first.num_admitted)
        num_active = float(np.mean([step.num_active for step in steps]))
        length = self.acceptance_length
        token_s = step_s / num_active / length if self.num_tokens else 0.0
        phases = self._phases(steps, num_active * length)
        return Block(self.candidate, self.round, admit_s, token_s, length, len(self.rows), phases)

    def _phases(self, steps: list[Step], tokens_per_step: float) -> PhaseSeconds:
        """Return the reported seconds per admitted row, and of decoding, per token."""
        admitting = [step for step in self.steps[1:] if step.num_admitted] or self.steps
        num_admitted = max(1, sum(step.num_admitted for step in admitting))
        decode_s = float(np.mean([max(0.0, step.seconds - step.encode_s - step.prefill_s) for step in steps]))
        return PhaseSeconds(
            sum(step.encode_s for step in admitting) / num_admitted,
            sum(step.prefill_s for step in admitting) / num_admitted,
            decode_s / tokens_per_step if self.num_tokens else 0.0,
        )

    def _full(self) -> list[Step]:
        """Return the steps at full slots, except the first step, which includes one-time setup."""
        most = max((step.num_active for step in self.steps), default=0)
        later = self.steps[1:] or self.steps
        return [step for step in later if step.num_active >= FULL_SHARE * most]


def fit_steps(steps: Sequence[Step]) -> tuple[float, float]:
    """Fit the seconds of a step without admission and the seconds per admitted row, by least squares over `steps`.

    If every step admits the same number of rows, only the predicted time of such a step is correct.
    """
    seconds = np.asarray([step.seconds for step in steps])
    factors = np.asarray([[1.0, step.num_admitted] for step in steps])
    solution = np.linalg.lstsq(factors, seconds, rcond=None)[0]
    for _ in range(NUM_REFITS if len(steps) >= MIN_TRIMMED_STEPS else 0):
        over = seconds - factors @ solution
        is_kept = over <= FAR_OFF * np.median(np.abs(over)) + MIN_OFF_S
        solution = np.linalg.lstsq(factors[is_kept], seconds[is_kept], rcond=None)[0]
    return max(0.0, float(solution[0])), max(0.0, float(solution[1]))


class TimeComparison:
    """Fits log(seconds) = a[candidate] + b[round] + noise to blocks by least squares.

    Changes between rounds that affect all candidates cancel. A candidate may be missing from later rounds.
    """

    def __init__(self, blocks: Sequence[Block], tokens_per_sample: float) -> None:
        self.blocks = tuple(blocks)
        self.names = tuple(dict.fromkeys(block.candidate for block in blocks))
        rounds = sorted({block.round for block in blocks})
        values = np.log([max(block.sample_s(tokens_per_sample), 1e-12) for block in blocks])
        is_candidate = np.array([[float(block.candidate == name) for name in self.names] for block in blocks])
        is_round = np.array([[float(block.round == number) for number in rounds] for block in blocks])
        # Round effects add up to zero.
        factors = np.hstack([is_candidate, is_round[:, :-1] - is_round[:, -1:]])
        solution, _, rank, _ = np.linalg.lstsq(factors, values, rcond=None)
        self._effects = solution[: len(self.names)]
        self._spread = np.linalg.pinv(factors.T @ factors)[: len(self.names), : len(self.names)]
        freedom = len(blocks) - int(rank)
        self._width = math.inf
        if freedom > 0:
            noise = float(np.sum((values - factors @ solution) ** 2)) / freedom
            student = T_95[max(known for known in T_95 if known <= freedom)]
            self._width = student * max(MIN_NOISE, math.sqrt(noise))

    @property
    def best(self) -> str:
        """The candidate with the least time per sample."""
        return self.names[int(np.argmin(self._effects))]

    def slowdown(self, name: str) -> float:
        """Return a candidate's time as a multiple of the best candidate's time."""
        return math.exp(self._contrast(name)[0])

    def is_slower(self, name: str) -> bool:
        """Return whether the confidence interval of the difference to the best candidate is above zero."""
        difference, margin = self._contrast(name)
        return difference > max(0.0, margin)

    def standing(self, name: str, note: str = "", plain: str | None = None) -> CandidateResult:
        """Return a candidate's seconds per sample with their interval, its acceptance length, its rows, and its
        speed-up over the candidate `plain` if that was measured."""
        index = self.names.index(name)
        blocks = [block for block in self.blocks if block.candidate == name]
        value = math.exp(self._effects[index])
        low = high = None
        if math.isfinite(self._width):
            margin = self._width * math.sqrt(max(0.0, self._spread[index, index]))
            low, high = value * math.exp(-margin), value * math.exp(margin)
        num_rows = sum(block.num_rows for block in blocks)
        length = sum(block.acceptance_length * block.num_rows for block in blocks) / num_rows
        result = CandidateResult(name, value, low, high, length, num_rows, note)
        if plain is None or plain not in self.names:
            return result
        ratio, margin = self._contrast(plain, name)
        speedups = (None, None) if math.isinf(margin) else (math.exp(ratio - margin), math.exp(ratio + margin))
        return replace(result, speedup=math.exp(ratio), speedup_low=speedups[0], speedup_high=speedups[1])

    def _contrast(self, name: str, other: str | None = None) -> tuple[float, float]:
        """Return the log difference to another candidate, by default the best, and half the width of its confidence
        interval."""
        index, best = self.names.index(name), self.names.index(other or self.best)
        if index == best:
            return 0.0, 0.0
        spread = self._spread[index, index] + self._spread[best, best] - 2 * self._spread[index, best]
        difference = float(self._effects[index] - self._effects[best])
        return difference, self._width * math.sqrt(max(0.0, spread)) if math.isfinite(self._width) else math.inf


def acceptance_band(blocks: Sequence[Block], name: str, least_share: float) -> tuple[float, float]:
    """Return mean ± max(three standard deviations, `least_share` · mean) of a candidate's acceptance lengths."""
    lengths = np.asarray([block.acceptance_length for block in blocks if block.candidate == name])
    middle = float(lengths.mean())
    deviation = float(lengths.std(ddof=1)) if len(lengths) > 1 else 0.0
    reach = max(least_share * middle, 3 * deviation)
    return middle - reach, middle + reach
