"""Counting what speculation did: per request while it runs, and over the engine's life. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decoding.types import Telemetry


@dataclass
class EngineStats:
    """Totals of one engine: forwards, steps, and seconds by phase."""

    num_steps: int = 0
    num_slot_steps: int = 0
    target_forwards: int = 0
    num_admitted: int = 0
    num_finished: int = 0
    num_generated_tokens: int = 0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0

    @property
    def batch_size_mean(self) -> float:
        """Active slots per step."""
        return self.num_slot_steps / self.num_steps if self.num_steps else 0.0


@dataclass
class RequestStats:
    """One request's counters while it is in a slot; see `Telemetry` for their meaning."""

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
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.max_levels + 1)

    def add_step(self, num_drafted: int, num_accepted: int, num_relaxed: int, ended_inside_path: bool) -> None:
        """Record one verify step: drafts offered, drafts kept in the output, and how the step ended."""
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
