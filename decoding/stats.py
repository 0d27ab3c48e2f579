"""Collects statistics of speculation per request and per engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from decoding.controllers.base import Choice, Reason, batch_class
from decoding.types import Telemetry


@dataclass
class Choices:
    """Counts of the controller's choices and their expected goodput; empty with a fixed depth.

    `counts` is keyed by (batch class, levels, reason). `promised` is keyed by batch class: the number of steps with an
    estimate, and the sums of the expected tokens per second of the choice and of plain decoding.
    """

    counts: Counter[tuple[int, int, Reason]] = field(default_factory=Counter)
    promised: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, num_active: int, choice: Choice) -> None:
        """Count one step; skip steps in which the controller had no choice."""
        if choice.reason in ("fixed", "last"):
            return
        size = batch_class(num_active)
        self.counts[size, choice.levels, choice.reason] += 1
        if choice.plain_tokens_per_s > 0:
            steps, chosen, plain = self.promised.get(size, (0, 0.0, 0.0))
            promised = (steps + 1, chosen + choice.tokens_per_s, plain + choice.plain_tokens_per_s)
            self.promised[size] = promised

    def extras(self) -> dict[str, Any]:
        """Return telemetry extras; empty with a fixed depth."""
        if not self.counts:
            return {}
        by_levels, by_reason = Counter[int](), Counter[Reason]()
        by_batch: dict[int, Counter[int]] = {}
        for (size, levels, reason), number in self.counts.items():
            by_levels[levels] += number
            by_reason[reason] += number
            by_batch.setdefault(size, Counter())[levels] += number
        extras: dict[str, Any] = {
            "levels_mean": round(sum(levels * n for levels, n in by_levels.items()) / by_levels.total(), 4),
            "levels_max": max(by_levels),
            "num_off_steps": by_levels[0],
            "num_measuring_steps": by_reason["start"] + by_reason["explore"],
            "by_batch_size": {},
        }
        for size, counted in sorted(by_batch.items()):
            steps, chosen, plain = self.promised.get(size, (0, 0.0, 0.0))
            extras["by_batch_size"][str(size)] = {
                "levels": {str(levels): number for levels, number in sorted(counted.items())},
                "num_promised_steps": steps,
                "tokens_per_s": round(chosen / steps, 3) if steps else 0.0,
                "plain_tokens_per_s": round(plain / steps, 3) if steps else 0.0,
            }
        return {"controller": extras}


@dataclass
class EngineStats:
    """Totals of one engine: forwards, steps, seconds by phase, and controller choices."""

    num_steps: int = 0
    num_slot_steps: int = 0
    target_forwards: int = 0
    num_admitted: int = 0
    num_shared_prompts: int = 0
    """Admitted samples that reused the encoding and prefill of an equal prompt."""
    num_feature_hits: int = 0
    """Cache hits of visual features."""
    num_finished: int = 0
    num_generated_tokens: int = 0
    encode_s: float = 0.0
    """Seconds that steps waited for prompt encoding."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    choices: Choices = field(default_factory=Choices)

    @property
    def batch_size_mean(self) -> float:
        """Mean number of active slots per step."""
        return self.num_slot_steps / self.num_steps if self.num_steps else 0.0


@dataclass
class RequestStats:
    """Counters of one request; see `Telemetry`."""

    max_levels: int
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_relaxed: int = 0
    histogram: list[int] = field(default_factory=list)
    ended_inside_path: bool = False
    target_forwards: int = 0
    drafter_forwards: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    batch_size_total: int = 0
    degraded: bool = False
    choices: Choices = field(default_factory=Choices)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.max_levels + 1)

    def add_step(self, num_drafted: int, num_accepted: int, num_relaxed: int, ended_inside_path: bool) -> None:
        """Add one verify step."""
        self.num_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_relaxed += num_relaxed
        self.histogram[num_accepted] += 1
        self.ended_inside_path = ended_inside_path

    def telemetry(self) -> Telemetry:
        return Telemetry(
            num_spec_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=sum(i * count for i, count in enumerate(self.histogram)),
            acceptance_histogram=tuple(self.histogram),
            num_relaxed_accepts=self.num_relaxed,
            ended_inside_path=self.ended_inside_path,
            target_forwards=self.target_forwards,
            drafter_forwards=self.drafter_forwards,
            prefill_ms=self.prefill_ms,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            batch_size_mean=self.batch_size_total / self.num_steps if self.num_steps else 0.0,
            degraded=self.degraded,
            extras=self.extras,
        )
