"""Finds the repetition at the end of a text: the last tokens are one sequence of 1 to 64 tokens, again and again.

It reads generated tokens on the host, one after the other, and knows neither probabilities nor words.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_PERIOD = 64
"""Number of tokens of the longest sequence whose repetition is a loop."""


@dataclass(frozen=True)
class Loop:
    """A repetition at the end of a text: the index of its first token, and the number of tokens of its sequence."""

    start: int
    period: int


@dataclass
class LoopDetector:
    """Ends a text at the first token at which its last tokens repeat one sequence at least `min_repeats` times.

    The repetition has at least `min_tokens` tokens and a period p of 1 to `MAX_PERIOD` tokens: with n tokens t, it
    begins at the least s for which t[i] = t[i + p] for all s ≤ i < n − p. The least period counts. Each token costs at
    most `MAX_PERIOD` steps: one per earlier place of the same token among the last `MAX_PERIOD` tokens.
    """

    min_repeats: int
    min_tokens: int
    _num_tokens: int = 0
    _places: dict[int, deque[int]] = field(default_factory=dict)
    """Indices of each token, the newest first."""
    _runs: dict[int, int] = field(default_factory=dict)
    """By period, the number of last tokens that equal the token a period before them; periods without any are absent.
    """

    def take(self, token: int) -> Loop | None:
        """Append a token and return the loop that the text now ends in; None if it ends in none."""
        places = self._places.setdefault(token, deque(maxlen=MAX_PERIOD))
        runs: dict[int, int] = {}
        for place in places:
            period = self._num_tokens - place
            if period > MAX_PERIOD:
                break
            runs[period] = self._runs.get(period, 0) + 1
        places.appendleft(self._num_tokens)
        self._num_tokens, self._runs = self._num_tokens + 1, runs
        for period, run in runs.items():  # the least period first
            if run + period >= max(self.min_repeats * period, self.min_tokens):
                return Loop(self._num_tokens - run - period, period)
        return None
