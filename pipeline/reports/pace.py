"""Measures the pace of a running job: the rate over the last minute, and the time that is left, with a range."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from actors.auto.comparison import T_95

MINUTE_S = 60.0
NUM_WINDOWS, MIN_WINDOWS = 6, 3
"""Windows of the last minute whose rates give the range of the time that is left."""


@dataclass
class RowPace:
    """Samples of (seconds since the start, rows done) of the last minute, and the last one before it."""

    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, elapsed_s: float, num_rows: int) -> None:
        """Add a sample; the first one is that of the first rows, so that loading does not count."""
        if not num_rows:
            return
        self.samples.append((elapsed_s, num_rows))
        while len(self.samples) > 2 and self.samples[1][0] <= elapsed_s - MINUTE_S:
            self.samples.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second over the last minute, or since the first rows; None before two samples differ in time."""
        if len(self.samples) < 2 or self.samples[-1][0] <= self.samples[0][0]:
            return None
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s)

    def left_s(self, total_rows: int | None) -> tuple[float, float] | None:
        """Return the range of seconds that are left: Student's 95 % interval of the rate over windows of the last
        minute. The upper limit is infinite if the rate may be 0. None if the total or the rate is unknown."""
        if total_rows is None or len(self.samples) < MIN_WINDOWS + 1 or not self.rows_per_s:
            return None
        times, rows = (np.array(values, float) for values in zip(*self.samples, strict=True))
        count = min(NUM_WINDOWS, len(times) - 1)
        edges = np.linspace(times[0], times[-1], count + 1)
        rates = np.diff(np.interp(edges, times, rows)) / np.diff(edges)
        width = T_95[count - 1] * float(rates.std(ddof=1)) / math.sqrt(count)
        remaining, mean = max(0.0, total_rows - float(rows[-1])), float(rates.mean())
        return remaining / (mean + width), remaining / (mean - width) if mean > width else math.inf


def duration(seconds: float) -> str:
    """Return a duration with two units at most, such as `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 and whole % 60 else f"{round(seconds / 60)} min"
    if whole < 172_800:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{seconds / 86_400:.1f} days"


def left_text(left_s: tuple[float, float] | None) -> str:
    """Return the range of the time that is left as text; empty if it is unknown."""
    if left_s is None:
        return ""
    low, high = left_s
    if math.isinf(high):
        return f"at least {duration(low)} left"
    return f"{duration(low)} left" if duration(low) == duration(high) else f"{duration(low)} to {duration(high)} left"
