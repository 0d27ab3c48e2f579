"""Shows the progress of a running job: actors report batches to an actor that counts them, and a thread of the driver
prints its counts and writes events of drift."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
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
from pipeline.reports.outcome import most_common
from pipeline.reports.summary import Summary

QUIET_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.5
READ_TIMEOUT_S = 10.0
BAR_WIDTH = 24
NOTHING = Summary("", "", "", 1.0)


class _LiveActor:
    """Adds up the digests of batches, by the time of their arrival."""

    def __init__(self, empty: Summary, bound: AcceptanceDropConfig | None, stamp: Stamp | None) -> None:
        self._live = Live(empty, DriftWatch(bound))
        self._metrics = DriftMetrics(stamp) if stamp else None
        self._began_s = time.monotonic()

    def add(self, digest: BatchDigest) -> None:
        drifts = self._live.add(digest, time.monotonic() - self._began_s)
        if self._metrics is not None:
            for drift in drifts:
                if drift.dropped:
                    self._metrics.drop(drift.source, drift.method)
            for (method, source), ratio in self._live.watch.take_completed().items():
                self._metrics.ratio(source, method, ratio)

    def counts(self, num_drifts: int) -> tuple[Counts, tuple[str, int], list[Drift]]:
        """Return the counts, the commonest error with its count, and the drifts after the first `num_drifts`."""
        return self._live.counts, most_common(self._live.summary.errors_by_type), list(self._live.since(num_drifts))

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
    with driver_actor(_LiveActor, deepcopy(empty), bound, stamp) as actor:

        def look() -> None:
            nonlocal num_rows_shown, num_drifts
            try:
                counts, error, drifts = ray.get(actor.counts.remote(num_drifts), timeout=READ_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                return  # a busy or stopped process; read again in the next round
            num_drifts += len(drifts)
            for drift in drifts:
                _show_drift(drift, stream, events, terminal)
            if not enabled or (not terminal and counts.num_rows == num_rows_shown):
                return
            num_rows_shown = counts.num_rows
            if events is not None:
                events.emit("progress", stream=stream, total_rows=total_rows, **asdict(counts))
                return
            line = progress_line(counts, total_rows, time.monotonic() - began_s, *error)
            stream.write(f"\r\x1b[K{bar(counts.num_rows, total_rows)} {line}" if terminal else f"{line}\n")
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


def progress_line(
    counts: Counts, total_rows: int | None, elapsed_s: float, error: str = "", num_errors: int = 0
) -> str:
    """Return one line with the rows done, rates since the start, the mean acceptance length so far, and the number of
    failed rows with the commonest `error` and its `num_errors`."""
    elapsed_s = max(elapsed_s, 1e-9)
    of_total = f" of {total_rows}" if total_rows is not None else ""
    line = f"{counts.num_rows}{of_total} rows, {counts.num_rows / elapsed_s:.1f} rows/s, "
    line += f"{counts.num_tokens / elapsed_s:,.0f} tokens/s"
    if counts.num_accepted:
        line += f", acceptance length {1 + counts.num_accepted / counts.num_steps:.2f}"
    if counts.num_errors:
        line += f", {counts.num_errors} failed ({error} {num_errors})"
    return line
