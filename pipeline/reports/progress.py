"""Shows the progress of a running job: actors report batches to an actor that counts them, and a thread of the driver
prints its counts and writes events of drift."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import pyarrow as pa
import ray

from actors.events import Events
from actors.metrics import DriftMetrics
from actors.results import Stamp
from configs.pool import AcceptanceDropConfig
from pipeline.cluster.ray_session import driver_actor, poll
from pipeline.reports.drift import Drift, DriftWatch
from pipeline.reports.live import BatchDigest, Counts, Live
from pipeline.reports.pace import RowPace, duration, left_text
from pipeline.reports.summary import Summary
from pipeline.reports.trials import listing

QUIET_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.5
READ_TIMEOUT_S = 10.0
BAR_WIDTH = 24
NOTHING = Summary("", "", "", 1.0)


@dataclass(frozen=True)
class Look:
    """State of a job at one time: counts, errors by code, phases of the engines that have not decoded yet, and new
    drifts."""

    counts: Counts
    errors: dict[str, int] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    drifts: tuple[Drift, ...] = ()


class _LiveActor:
    """Adds up the digests of batches, by the time of their arrival."""

    def __init__(self, empty: Summary, bound: AcceptanceDropConfig | None, stamp: Stamp | None) -> None:
        self._live = Live(empty, DriftWatch(bound))
        self._metrics = DriftMetrics(stamp) if stamp else None
        self._began_s = time.monotonic()
        self._phases: dict[str, str] = {}

    def phase(self, who: str, text: str) -> None:
        """Note what an engine is doing before its first batch; with an empty text, it is ready."""
        self._phases[who] = text

    def add(self, digest: BatchDigest) -> None:
        drifts = self._live.add(digest, time.monotonic() - self._began_s)
        if self._metrics is not None:
            for drift in drifts:
                if drift.dropped:
                    self._metrics.drop(drift.source, drift.method)
            for (method, source), ratio in self._live.watch.take_completed().items():
                self._metrics.ratio(source, method, ratio)

    def look(self, num_drifts: int) -> Look:
        """Return the state, with the drifts after the first `num_drifts`."""
        errors = dict(self._live.summary.errors_by_type)
        phases = tuple(text for text in self._phases.values() if text)
        return Look(self._live.counts, errors, phases, tuple(self._live.since(num_drifts)))

    def live(self) -> Live:
        return self._live


@dataclass(frozen=True)
class ProgressClient:
    """Client of the actor that counts a job. Serialisable; its call is the `ReportProgress` of the engine actors."""

    actor: Any
    empty: Summary

    def __call__(self, table: pa.Table) -> None:
        """Report one batch of results without waiting for an answer."""
        self.actor.add.remote(BatchDigest.of(table, self.empty))

    def phase(self, who: str, text: str) -> None:
        """Report what an engine is doing before its first batch, without waiting for an answer."""
        self.actor.phase.remote(who, text)

    def live(self) -> Live | None:
        """Return a copy of the state; None if the actor does not answer."""
        try:
            snapshot: Live = ray.get(self.actor.live.remote(), timeout=READ_TIMEOUT_S)
        except ray.exceptions.RayError:
            return None
        return snapshot


@contextlib.contextmanager
def open_progress(
    total_rows: int | None,
    enabled: bool = True,
    stream: TextIO | None = None,
    events: Events | None = None,
    empty: Summary = NOTHING,
    bound: AcceptanceDropConfig | None = None,
) -> Iterator[ProgressClient]:
    """Count a job while the block runs, and show its progress if `enabled`; yield the client for the actors.

    With enabled `events`, progress is emitted as events instead of a line. Drops of acceptance beyond `bound` are
    always shown.
    """
    stream = stream or sys.stderr
    stamp = events.stamp if events is not None else None
    events = events if events is not None and events.enabled else None
    terminal = enabled and stream.isatty() and events is None
    began_s = time.monotonic()
    num_rows_shown = num_drifts = 0
    phase_shown = ""
    pace = RowPace()
    with driver_actor(_LiveActor, deepcopy(empty), bound, stamp) as actor:

        def look() -> None:
            nonlocal num_rows_shown, num_drifts, phase_shown
            try:
                seen: Look = ray.get(actor.look.remote(num_drifts), timeout=READ_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                return  # a busy or stopped process; read again in the next round
            num_drifts += len(seen.drifts)
            for drift in seen.drifts:
                _show_drift(drift, stream, events, terminal)
            counts, elapsed_s = seen.counts, time.monotonic() - began_s
            pace.add(elapsed_s, counts.num_rows)
            phase = phase_line(seen.phases) if not counts.num_rows else ""
            is_news = counts.num_rows != num_rows_shown or phase != phase_shown
            if not enabled or not (terminal or is_news):
                return
            num_rows_shown, phase_shown = counts.num_rows, phase
            if events is not None:
                events.emit("progress", stream=stream, **progress_values(seen, phase, total_rows, elapsed_s, pace))
                return
            line = f"{phase}, {duration(elapsed_s)}" if phase else progress_line(seen, total_rows, elapsed_s, pace)
            drawn = line if phase else f"{bar(counts.num_rows, total_rows)} {line}"
            stream.write(f"\r\x1b[K{fitted(drawn)}" if terminal else f"{line}\n")
            stream.flush()

        try:
            with poll(look, TERMINAL_INTERVAL_S if terminal else QUIET_INTERVAL_S, "progress", last_look=True):
                yield ProgressClient(actor, empty)
        finally:
            if terminal:
                stream.write("\n")


def _show_drift(drift: Drift, stream: TextIO, events: Events | None, terminal: bool) -> None:
    if events is None:
        clear = "\r\x1b[K" if terminal else ""
        stream.write(f"{clear}acceptance: {drift.text()}\n")
        stream.flush()
        return
    name, level = ("acceptance_dropped", "warning") if drift.dropped else ("acceptance_recovered", "info")
    values = {**asdict(drift), **asdict(drift.change)}
    del values["change"], values["dropped"]
    events.emit(name, level, stream=stream, **values)


def bar(num_rows: int, total_rows: int | None) -> str:
    """Return a progress bar of fixed width, such as `[#####-----]`; empty if the total is unknown."""
    if not total_rows:
        return ""
    filled = min(BAR_WIDTH, BAR_WIDTH * num_rows // total_rows)
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]"


def phase_line(phases: Sequence[str]) -> str:
    """Return what most engines are doing before the first rows; empty if all are ready."""
    if not phases:
        return ""
    phase, number = Counter(phases).most_common(1)[0]
    return phase if len(phases) == 1 else f"{phase} ({number} of {len(phases)} engines)"


def progress_line(seen: Look, total_rows: int | None, elapsed_s: float, pace: RowPace | None = None) -> str:
    """Return one line: rows done with their share, rates since the start and over the last minute, the mean acceptance
    length, the time that passed and the range of what is left, and failed rows by code."""
    counts, pace = seen.counts, pace or RowPace()
    each_s = max(elapsed_s, 1e-9)
    share = f" ({percent(counts.num_rows, total_rows):.0f} %)" if total_rows else ""
    of_total = f" of {total_rows:,}" if total_rows is not None else ""
    now = "" if pace.rows_per_s is None else f" ({pace.rows_per_s:.1f} in the last minute)"
    parts = [
        f"{counts.num_rows:,}{of_total} rows{share}",
        f"{counts.num_rows / each_s:.1f} rows/s{now}",
        f"{counts.num_tokens / each_s:,.0f} tokens/s",
    ]
    if counts.num_accepted:
        parts.append(f"acceptance length {1 + counts.num_accepted / counts.num_steps:.2f}")
    parts.append(f"{duration(elapsed_s)} elapsed")
    if left := left_text(pace.left_s(total_rows)):
        parts.append(left)
    if counts.num_errors:
        parts.append(f"{counts.num_errors:,} failed ({listing(seen.errors)})")
    return ", ".join(parts)


def progress_values(
    seen: Look, phase: str, total_rows: int | None, elapsed_s: float, pace: RowPace
) -> dict[str, Any]:
    """Return the values of a progress event: those of `progress_line`; unknown ones are None."""
    left = pace.left_s(total_rows)
    limits = [None if left is None or math.isinf(value) else round(value, 1) for value in left or (0.0, 0.0)]
    return {
        "total_rows": total_rows,
        **asdict(seen.counts),
        "percent": percent(seen.counts.num_rows, total_rows) if total_rows else None,
        "elapsed_s": round(elapsed_s, 1),
        "rows_per_s_last_minute": None if pace.rows_per_s is None else round(pace.rows_per_s, 3),
        "left_low_s": limits[0],
        "left_high_s": limits[1],
        "errors": dict(seen.errors),
        "phase": phase,
    }


def percent(num_rows: int, total_rows: int) -> float:
    """Return the share of rows in percent, rounded down to a tenth, so that 100 means all."""
    return math.floor(1000 * min(num_rows, total_rows) / total_rows) / 10


def fitted(line: str) -> str:
    """Cut a line at the width of the terminal, on which a longer one could not be drawn over."""
    width = shutil.get_terminal_size((200, 24)).columns
    return line if len(line) < width else line[: max(1, width - 2)] + "…"
