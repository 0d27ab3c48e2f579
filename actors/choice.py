"""Values of a trial of methods: what was found, and rows that know which method decoded them.

Plain data, which travels from actors to the summary. Knows nothing of how a trial is held.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoding.types import Completion

CHOSEN, WITHIN, SLOWER = "chosen", "within the interval", "slower"


@dataclass(frozen=True)
class Standing:
    """One candidate after its blocks; the interval of 95 % is None while one round alone has been measured."""

    method: str
    sample_s: float | None
    """Engine seconds of one sample; None where nothing was measured."""
    low_s: float | None
    high_s: float | None
    acceptance_length: float
    num_rows: int
    note: str = ""
    """What became of it: `chosen`, `within the interval` of the chosen one, `slower`, or why it was dropped."""


@dataclass(frozen=True)
class Choice:
    """What one trial found: the method that was kept, why it was held, and every candidate's standing."""

    method: str
    reason: str
    num_rows: int
    num_rounds: int
    tokens_per_sample: float
    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class TriedCompletion(Completion):
    """A completion that knows which of several methods decoded it."""

    method: str = ""
