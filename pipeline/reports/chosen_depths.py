"""Draft depths chosen by an engine's controller, by batch size, summed over the telemetry of rows.

A row counts its own steps, so a step counts once for every row in its batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class AtBatchSize:
    """Steps of rows in batches of one size, by levels; and over the `num_promised` of which something was expected, the
    sums of expected tokens per second of the whole batch, as chosen and plain."""

    levels: dict[int, int] = field(default_factory=dict)
    num_promised: int = 0
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0

    def add(self, other: AtBatchSize) -> None:
        for levels, number in other.levels.items():
            self.levels[levels] = self.levels.get(levels, 0) + number
        self.num_promised += other.num_promised
        self.tokens_per_s += other.tokens_per_s
        self.plain_tokens_per_s += other.plain_tokens_per_s


@dataclass
class ChosenDepths:
    """Empty without a controller; a key of `by_batch_size` is a power of two with all sizes down to the next one."""

    num_steps: int = 0
    num_off_steps: int = 0
    num_measuring_steps: int = 0
    by_batch_size: dict[int, AtBatchSize] = field(default_factory=dict)

    def add_row(self, extras: str | None) -> None:
        """Count one row's `telemetry.extras`."""
        if not extras or '"controller"' not in extras:
            return
        told: dict[str, Any] = json.loads(extras).get("controller", {})
        self.num_off_steps += told["num_off_steps"]
        self.num_measuring_steps += told["num_measuring_steps"]
        for size, one in told["by_batch_size"].items():
            levels = {int(depth): number for depth, number in one["levels"].items()}
            steps = one["num_promised_steps"]
            promised = (steps * one["tokens_per_s"], steps * one["plain_tokens_per_s"])
            self.by_batch_size.setdefault(int(size), AtBatchSize()).add(AtBatchSize(levels, steps, *promised))
            self.num_steps += sum(levels.values())

    def add(self, other: ChosenDepths) -> None:
        """Count what another job counted."""
        self.num_steps += other.num_steps
        self.num_off_steps += other.num_off_steps
        self.num_measuring_steps += other.num_measuring_steps
        for size, one in other.by_batch_size.items():
            self.by_batch_size.setdefault(size, AtBatchSize()).add(one)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with means in place of sums."""
        data = asdict(self)
        for size, one in self.by_batch_size.items():
            many = max(one.num_promised, 1)
            means = {"tokens_per_s": one.tokens_per_s / many, "plain_tokens_per_s": one.plain_tokens_per_s / many}
            data["by_batch_size"][size] |= means
        return data

    def lines(self) -> list[tuple[str, str]]:
        """What the summary shows, as (label, value)."""
        if not self.num_steps:
            return []
        off, measuring = (100 * n / self.num_steps for n in (self.num_off_steps, self.num_measuring_steps))
        lines = [("depths chosen", f"off in {off:.0f} % of steps, {measuring:.1f} % to measure")]
        for size, one in sorted(self.by_batch_size.items()):
            total = sum(one.levels.values())
            shares = ", ".join(f"{depth}: {100 * number / total:.0f} %" for depth, number in sorted(one.levels.items()))
            if one.num_promised:
                chosen, plain = one.tokens_per_s / one.num_promised, one.plain_tokens_per_s / one.num_promised
                shares += f" (expected tokens/s {chosen:,.0f}, plain {plain:,.0f})"
            lines.append((f"  batch {size}", shares))
        return lines
