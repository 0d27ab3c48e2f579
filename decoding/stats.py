"""Collects statistics of an engine and of the controller's choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from decoding.controllers.base import DepthChoice, Reason, batch_class


@dataclass
class Choices:
    """Counts of the controller's choices and their expected goodput; empty with a fixed depth.

    `counts` is keyed by (batch class, levels, reason). `promised` is keyed by batch class: the number of steps with an
    estimate, and the sums of the expected tokens per second of the choice and of plain decoding.
    """

    counts: Counter[tuple[int, int, Reason]] = field(default_factory=Counter)
    promised: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, num_active: int, choice: DepthChoice) -> None:
        """Count one step; skip steps in which the controller had no choice."""
        if choice.reason in ("fixed", "last"):
            return
        size = batch_class(num_active)
        self.counts[size, choice.levels, choice.reason] += 1
        if choice.plain_tokens_per_s > 0:
            steps, chosen, plain = self.promised.get(size, (0, 0.0, 0.0))
            self.promised[size] = steps + 1, chosen + choice.tokens_per_s, plain + choice.plain_tokens_per_s

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
    """Totals of one engine: forwards, steps, and seconds by phase."""

    num_steps: int = 0
    num_slot_steps: int = 0
    target_forwards: int = 0
    num_admitted: int = 0
    num_feature_hits: int = 0
    """Cache hits of visual features."""
    num_generated_tokens: int = 0
    encode_s: float = 0.0
    """Seconds that steps waited for prompt encoding."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
