"""Defines the results of a trial of methods."""

from __future__ import annotations

from dataclasses import dataclass

CHOSEN, WITHIN, SLOWER = "chosen", "within the interval", "slower"


@dataclass(frozen=True)
class CandidateResult:
    """Result of one candidate; the 95 % interval is None after a single round."""

    method: str
    sample_s: float | None
    """Engine seconds per sample; None if not measured."""
    low_s: float | None
    high_s: float | None
    acceptance_length: float
    num_rows: int
    note: str = ""
    """`chosen`, `within the interval` of the chosen method, `slower`, or the reason why it was dropped."""


@dataclass(frozen=True)
class Choice:
    """Result of one trial: the chosen method, the reason for the trial, and the results of all candidates."""

    method: str
    reason: str
    num_rows: int
    num_rounds: int
    tokens_per_sample: float
    standings: tuple[CandidateResult, ...]
