"""Estimates the seconds of the drafter's prompt prefill per generated token."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from decoding.controllers.base import PrefillTime

MAX_SAMPLES = 16
MEMORY_SAMPLES = 256.0
"""Time constant of the exponential decay, in finished samples."""


class PrefillTimeModel:
    """Model of prefill seconds per prompt token and of the rate at which samples finish.

    The rate is finished samples per generated token, over the tokens of all samples, unfinished ones included.
    """

    def __init__(self) -> None:
        self._prefills: deque[PrefillTime] = deque(maxlen=MAX_SAMPLES)
        self._num_prompt, self._num_ended, self._num_generated = 0.0, 0.0, 0.0

    def add(self, prefill: PrefillTime, num_tokens: int, ended: Sequence[int]) -> None:
        """Add one step: its prefill, its generated tokens, and the prompt lengths of the rows that finished."""
        if prefill.num_tokens:
            self._prefills.append(prefill)
        keep = (1.0 - 1.0 / MEMORY_SAMPLES) ** len(ended)
        self._num_prompt = keep * self._num_prompt + sum(ended)
        self._num_ended = keep * self._num_ended + len(ended)
        self._num_generated = keep * self._num_generated + num_tokens

    def prefill_s_of(self, num_tokens: int) -> float:
        """Return the expected prefill seconds of `num_tokens` prompt tokens; 0 before the first prefill.

        Uses the median of recent prefills, because single prefills may include compilation.
        """
        rates = [one.seconds / one.num_tokens for one in self._prefills]
        return num_tokens * statistics.median_low(rates) if rates else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Prefill seconds per generated token while every finished sample is replaced by a new sample."""
        return self.prefill_s_of(1) * self._num_prompt / self._num_generated if self._num_generated else 0.0

    def remaining_tokens(self, num_active: int) -> float:
        """Return the expected remaining tokens of `num_active` rows: half a mean output each."""
        return num_active * self._num_generated / (2.0 * self._num_ended) if self._num_ended else math.inf
