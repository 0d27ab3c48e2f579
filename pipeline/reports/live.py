"""Counts a running job from the batches that its actors report: totals, rates over time, errors, samples, drift.

Memory is bounded for any number of rows. A batch that Ray runs twice counts twice here, but once in the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.reports.drift import Drift, DriftWatch, Moments, moments
from pipeline.reports.summary import Summary

MAX_WINDOWS = 160
"""Maximum number of windows of the history; if they are full, pairs are merged and the width doubles."""
FIRST_WIDTH_S = 1.0
MAX_CODES, MAX_EXAMPLES = 64, 3
MAX_SAMPLES = 24
MAX_TEXT_CHARS = 2_000
MAX_DRIFTS = 100
SAMPLE_COLUMNS = (
    *("sample_id", "source", "method", "status", "error_type", "error_message", "generated_text"),
    *("num_generated_tokens", "telemetry", "audit_text", "audit_loss", "failed_checks"),
)
"""Columns of a row that the gallery shows, as far as they exist."""


@dataclass
class Counts:
    """Counts of an interval of time, or of all of it."""

    num_rows: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class History:
    """Consecutive windows of `width_s` seconds from the job's start."""

    width_s: float = FIRST_WIDTH_S
    windows: list[Counts] = field(default_factory=list)

    def add(self, at_s: float, counts: Counts) -> None:
        """Add counts at `at_s` seconds after the start."""
        while at_s >= self.width_s * MAX_WINDOWS:
            pairs = [self.windows[index : index + 2] for index in range(0, len(self.windows), 2)]
            for left, *right in pairs:
                for window in right:
                    left.add(window)
            self.windows = [pair[0] for pair in pairs]
            self.width_s *= 2
        index = int(at_s / self.width_s)
        self.windows += [Counts() for _ in range(index + 1 - len(self.windows))]
        self.windows[index].add(counts)


@dataclass(frozen=True)
class BatchDigest:
    """Counts of one batch, and a few of its rows."""

    summary: Summary
    groups: tuple[tuple[str, str, Moments], ...]
    errors: dict[str, list[dict[str, str]]]
    samples: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, table: pa.Table, empty: Summary) -> BatchDigest:
        """Count the rows of a result table into a copy of `empty`."""
        summary = deepcopy(empty)
        summary.add_rows(table)
        errors = Examples()
        for row in (
            table.filter(pa.array([bool(code) for code in table["error_type"].to_pylist()], pa.bool_()))
            .select(["sample_id", "error_type", "error_message"])
            .to_pylist()
        ):
            errors.add(row["error_type"], row["sample_id"], row["error_message"])
        names = [name for name in SAMPLE_COLUMNS if name in table.column_names]
        audited = audited_places(table)[:1]
        indices = sorted({0, table.num_rows // 2, *audited}) if table.num_rows else []
        return cls(
            summary,
            tuple(moments(table)),
            errors.by_code,
            tuple(map(short, table.select(names).take(pa.array(indices, pa.int64())).to_pylist())),
        )


def audited_places(table: pa.Table | pa.RecordBatch) -> list[int]:
    """Return the rows of a result table that have an audit; none if the job has no audit."""
    if "audit_loss" not in table.schema.names:
        return []
    return np.flatnonzero(pc.is_valid(table["audit_loss"]).to_numpy(zero_copy_only=False)).tolist()


class Examples:
    """The first rows of each error code."""

    def __init__(self) -> None:
        self.by_code: dict[str, list[dict[str, str]]] = {}

    def add(self, code: str, sample_id: str, message: str) -> None:
        if code not in self.by_code and len(self.by_code) >= MAX_CODES:
            return
        examples = self.by_code.setdefault(code, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append({"sample_id": sample_id[:MAX_TEXT_CHARS], "message": message[:MAX_TEXT_CHARS]})


def short(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its texts cut at `MAX_TEXT_CHARS`."""
    return {name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value for name, value in row.items()}


@dataclass
class Live:
    """State of a running job, for its progress line and its report."""

    summary: Summary
    watch: DriftWatch
    counts: Counts = field(default_factory=Counts)
    history: History = field(default_factory=History)
    errors: Examples = field(default_factory=Examples)
    samples: list[dict[str, Any]] = field(default_factory=list)
    drifts: deque[Drift] = field(default_factory=lambda: deque(maxlen=MAX_DRIFTS))
    """The latest drops and recoveries of acceptance."""
    num_drifts: int = 0
    _stride: int = 1
    _skipped: int = 0

    def add(self, digest: BatchDigest, at_s: float) -> list[Drift]:
        """Add a batch that arrived `at_s` seconds after the start; return new drops and recoveries."""
        self.summary.add(digest.summary)
        summary = digest.summary
        sums = (summary.num_samples, summary.num_errors, summary.num_generated_tokens, summary.num_steps)
        counts = Counts(*sums, summary.num_accepted_draft_tokens)
        self.counts.add(counts)
        self.history.add(at_s, counts)
        for code, examples in digest.errors.items():
            for example in examples:
                self.errors.add(code, **example)
        for row in digest.samples:
            self._keep(row)
        drifts = [event for group in digest.groups for event in self.watch.add(*group)]
        self.drifts.extend(drifts)
        self.num_drifts += len(drifts)
        return drifts

    def _keep(self, row: dict[str, Any]) -> None:
        """Keep every `_stride`-th row; the stride doubles, and every second row is removed, if they are too many."""
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.samples.append(row)
        if len(self.samples) > 2 * MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._stride *= 2

    def since(self, num_drifts: int) -> Iterator[Drift]:
        """Yield the drops and recoveries after the first `num_drifts`, as far as they are kept."""
        missing = self.num_drifts - num_drifts
        yield from list(self.drifts)[len(self.drifts) - min(missing, len(self.drifts)) :]


def windows_of(history: History) -> list[dict[str, Any]]:
    """Return the windows as plain data, with the time of their end in seconds."""
    return [{"end_s": (index + 1) * history.width_s, **asdict(window)} for index, window in enumerate(history.windows)]
