"""Compares acceptance lengths of windows of rows, by source prefix, with those of the job's first rows.

The acceptance length 1 + Σ accepted / Σ steps is a ratio estimator over rows; its variance is the delta method's
(Cochran, Sampling Techniques, 3rd ed., section 6.4). Rows of one source are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.pool import AcceptanceDropConfig

QUANTILE = 3.29
"""Normal quantile of a one-sided probability of 0.0005, because one job has many windows."""
MAX_GROUPS = 128
"""Maximum number of pairs of a method and a source prefix; further prefixes share one group."""
ALL, OTHERS, ROOT = "all sources", "other sources", "."


@dataclass(frozen=True)
class Moments:
    """Sums over rows with drafts: number of rows, steps `s`, accepted drafts `a`, and their products."""

    num_rows: int = 0
    s: float = 0.0
    a: float = 0.0
    ss: float = 0.0
    aa: float = 0.0
    sa: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(left + right for left, right in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def length(self) -> float:
        """Acceptance length, the bonus token included."""
        return 1 + self.a / self.s if self.s else 1.0

    @property
    def log_variance(self) -> float:
        """Variance of the logarithm of `length`; infinite for fewer than two rows."""
        if self.num_rows < 2 or not self.s:
            return math.inf
        ratio = self.a / self.s
        squares = max(0.0, self.aa - 2 * ratio * self.sa + ratio**2 * self.ss)
        return squares * self.num_rows / (self.num_rows - 1) / self.s**2 / self.length**2


@dataclass(frozen=True)
class Change:
    """A window's acceptance length, and its ratio to the reference with the interval of `QUANTILE`."""

    length: float
    reference: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, window: Moments, reference: Moments) -> Change:
        ratio = window.length / reference.length
        width = QUANTILE * math.sqrt(window.log_variance + reference.log_variance)
        # A length is at least 1, so that no ratio is below 1 / reference.
        low, high = ratio * math.exp(-width), ratio * math.exp(min(width, 700.0))
        return cls(window.length, reference.length, ratio, max(low, 1 / reference.length), high)


@dataclass(frozen=True)
class Drift:
    """A drop of acceptance that exceeds the bound, or its end: one event of the job."""

    method: str
    source: str
    num_rows: int
    """Rows with drafts that the job had decoded at this point."""
    dropped: bool
    """False if the acceptance has recovered."""
    change: Change

    def text(self) -> str:
        verb = "dropped" if self.dropped else "recovered"
        change = self.change
        return (
            f"{self.source}: acceptance length {verb} to {change.length:.2f}, {change.ratio:.0%} of "
            f"{change.reference:.2f} ({change.low:.0%} to {change.high:.0%}), after {self.num_rows:,} "
            f"rows of {self.method}"
        )


@dataclass
class DriftGroup:
    """Rows of one method and source prefix: all of them, the current window, and the last complete window."""

    method: str
    source: str
    total: Moments = Moments()
    window: Moments = Moments()
    last: Change | None = None
    dropped: bool = False


def moments(table: pa.Table) -> Iterator[tuple[str, str, Moments]]:
    """Yield (method, source prefix, moments) of the rows of a result table that have drafts."""
    telemetry = table["telemetry"]
    steps, drafts, accepted = (
        pc.fill_null(pc.struct_field(telemetry, name), 0).to_numpy().astype(np.float64)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    groups: dict[tuple[str, str], list[int]] = {}
    names = zip(table["method"].to_pylist(), table["source"].to_pylist(), strict=True)
    for row, (method, source) in enumerate(names):
        if drafts[row] > 0:
            groups.setdefault((method, prefix_of(source)), []).append(row)
    for (method, prefix), rows in groups.items():
        s, a = steps[rows], accepted[rows]
        sums = (s.sum(), a.sum(), s @ s, a @ a, s @ a)
        yield method, prefix, Moments(len(rows), *(float(value) for value in sums))


def prefix_of(source: str) -> str:
    """Return the first folder of a source path; `ROOT` if it has none."""
    folder, slash, _ = source.lstrip("/").partition("/")
    return folder if slash else ROOT


@dataclass
class DriftWatch:
    """Compares complete windows of `bound.min_rows` rows with the first `bound.min_rows` rows of the same method.

    Without a `bound`, rows are counted and nothing is compared.
    """

    bound: AcceptanceDropConfig | None = None
    references: dict[str, Moments] = field(default_factory=dict)
    groups: dict[tuple[str, str], DriftGroup] = field(default_factory=dict)
    _completed: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, method: str, source: str, rows: Moments) -> list[Drift]:
        """Add rows, and return the drops and recoveries that they complete."""
        events = [self._add(method, name, rows) for name in (ALL, self._known(method, source))]
        if self.bound is not None and (first := self.references.get(method, Moments())).num_rows < self.bound.min_rows:
            self.references[method] = first + rows
        return [event for event in events if event is not None]

    def _known(self, method: str, source: str) -> str:
        is_full = (method, source) not in self.groups and len(self.groups) >= MAX_GROUPS
        return OTHERS if is_full else source

    def _add(self, method: str, source: str, rows: Moments) -> Drift | None:
        group = self.groups.setdefault((method, source), DriftGroup(method, source))
        group.total += rows
        reference = self.references.get(method, Moments())
        if self.bound is None or reference.num_rows < self.bound.min_rows:
            return None
        group.window += rows
        if group.window.num_rows < self.bound.min_rows:
            return None
        group.last, group.window = Change.of(group.window, reference), Moments()
        self._completed[method, source] = group.last.ratio
        least = 1 - self.bound.max_drop
        is_event = group.last.ratio >= least if group.dropped else group.last.high < least
        if not is_event:
            return None
        group.dropped = not group.dropped
        num_rows = self.groups[method, ALL].total.num_rows
        return Drift(method, source, num_rows, group.dropped, group.last)

    def take_completed(self) -> dict[tuple[str, str], float]:
        """Return method and source of the groups that completed a window since the last call, with the ratios of the
        windows' acceptance lengths to the reference."""
        completed, self._completed = self._completed, {}
        return completed

    def table(self) -> list[dict[str, Any]]:
        """Return the groups as plain data, those of all sources first."""
        ordered = sorted(self.groups.values(), key=lambda group: (group.source != ALL, group.source, group.method))
        return [
            {
                **{name: getattr(group, name) for name in ("method", "source", "dropped")},
                "num_rows": group.total.num_rows,
                "acceptance_length": group.total.length,
                "last": asdict(group.last) if group.last else None,
            }
            for group in ordered
        ]
