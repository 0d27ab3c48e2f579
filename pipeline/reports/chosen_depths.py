"""Counts the draft depths that an engine's controller chose, by batch size; a step counts once per row of its batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

Key = TypeVar("Key")


def add_counts(total: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, number in more.items():
        total[key] = total.get(key, 0) + number


@dataclass
class AtBatchSize:
    """Steps of rows in batches of one size, by draft depth (`levels`). `num_promised` steps had an estimate; the other
    fields sum the expected throughput of the whole batch, at the chosen depth and for plain decoding."""

    levels: dict[int, int] = field(default_factory=dict)
    num_promised: int = 0
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0

    def add(self, other: AtBatchSize) -> None:
        add_counts(self.levels, other.levels)
        self.num_promised += other.num_promised
        self.tokens_per_s += other.tokens_per_s
        self.plain_tokens_per_s += other.plain_tokens_per_s

    def means(self) -> dict[str, float]:
        """Return the expected tokens per second, averaged over the steps that had an estimate."""
        many = max(self.num_promised, 1)
        return {"tokens_per_s": self.tokens_per_s / many, "plain_tokens_per_s": self.plain_tokens_per_s / many}


@dataclass
class ChosenDepths:
    """Counts of steps by batch size and depth, empty without a controller. A key of `by_batch_size` is a power of two
    that includes all sizes above the next smaller power."""

    num_steps: int = 0
    num_off_steps: int = 0
    num_measuring_steps: int = 0
    by_batch_size: dict[int, AtBatchSize] = field(default_factory=dict)

    def add_row(self, extras: str | None) -> None:
        """Add the steps in one row's `telemetry.extras`, a JSON object."""
        row: dict[str, Any] = json.loads(extras or "{}").get("controller", {"by_batch_size": {}})
        sizes = {}
        for size, entry in row["by_batch_size"].items():
            levels = {int(depth): number for depth, number in entry["levels"].items()}
            steps = entry["num_promised_steps"]
            tokens_per_s = (steps * entry[name] for name in ("tokens_per_s", "plain_tokens_per_s"))
            sizes[int(size)] = AtBatchSize(levels, steps, *tokens_per_s)
        num_steps = sum(sum(entry.levels.values()) for entry in sizes.values())
        self.add(ChosenDepths(num_steps, row.get("num_off_steps", 0), row.get("num_measuring_steps", 0), sizes))

    def add(self, other: ChosenDepths) -> None:
        """Add the counts of another job."""
        self.num_steps += other.num_steps
        self.num_off_steps += other.num_off_steps
        self.num_measuring_steps += other.num_measuring_steps
        for size, entry in other.by_batch_size.items():
            self.by_batch_size.setdefault(size, AtBatchSize()).add(entry)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with mean throughputs in place of the sums."""
        sizes = {size: asdict(entry) | entry.means() for size, entry in self.by_batch_size.items()}
        return asdict(self) | {"by_batch_size": sizes}

    def lines(self) -> list[tuple[str, str]]:
        """Return lines of the summary as (label, value)."""
        if not self.num_steps:
            return []
        off, measuring = (100 * n / self.num_steps for n in (self.num_off_steps, self.num_measuring_steps))
        lines = [("depths chosen", f"off in {off:.0f} % of steps, {measuring:.1f} % to measure")]
        for size, entry in sorted(self.by_batch_size.items()):
            total = sum(entry.levels.values())
            shares = ", ".join(
                f"{depth}: {100 * number / total:.0f} %" for depth, number in sorted(entry.levels.items())
            )
            if entry.num_promised:
                chosen, plain = entry.means().values()
                shares += f" (expected tokens/s {chosen:,.0f}, plain {plain:,.0f})"
            lines.append((f"  batch {size}", shares))
        return lines
