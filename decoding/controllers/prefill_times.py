"""What a drafter's reading of prompts adds to every token that is made. Host numbers only."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from decoding.controllers.base import Reading

MEMORY_READINGS = 16
MEMORY_ENDS = 256.0
"""Samples that ended and count: older ones fade."""


class PromptCosts:
    """Seconds per token read, and how often samples end, with how long prompts.

    How often is a hazard: samples that ended over tokens of all, those that still run among them, as short outputs end
    first.
    """

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=MEMORY_READINGS)
        self._num_prompt, self._num_ended, self._num_made = 0.0, 0.0, 0.0

    def add(self, reading: Reading, num_tokens: int, ended: Sequence[int]) -> None:
        """Follow one step: what was read, how many tokens were made, the prompts' tokens of the rows that ended."""
        if reading.num_tokens:
            self._readings.append(reading)
        keep = (1.0 - 1.0 / MEMORY_ENDS) ** len(ended)
        self._num_prompt = keep * self._num_prompt + sum(ended)
        self._num_ended = keep * self._num_ended + len(ended)
        self._num_made = keep * self._num_made + num_tokens

    def read_s(self, num_tokens: int) -> float:
        """What reading so many tokens is expected to take; nothing as long as none were read.

        The median of the last readings: one of them may have waited for a compiler, which says nothing of the others.
        """
        rates = [one.seconds / one.num_tokens for one in self._readings]
        return num_tokens * statistics.median_low(rates) if rates else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Reading per token made, where every sample that ends is followed by another."""
        return self.read_s(1) * self._num_prompt / self._num_made if self._num_made else 0.0

    def num_left(self, num_active: int) -> float:
        """Tokens that so many rows are still expected to make: half a text each."""
        return num_active * self._num_made / (2.0 * self._num_ended) if self._num_ended else math.inf
