"""Shows the progress of a running job: actors report batches to a tally, which a thread of the driver prints. A batch
that Ray runs twice counts twice here, but once in the output and the summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

import ray

from actors.events import Events
from actors.results import Tally
from pipeline.cluster.ray_session import driver_actor, polled

QUIET_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.5
BAR_WIDTH = 24


@dataclass
class Counts:
    """Sums over the reports of all actors."""

    num_rows: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0


class _TallyActor:
    def __init__(self) -> None:
        self._counts: tuple[int, ...] = (0, 0, 0, 0)

    def add(self, *counts: int) -> tuple[int, ...]:
        """Add counts, and return the sums."""
        self._counts = tuple(map(sum, zip(self._counts, counts, strict=True)))
        return self._counts


@contextlib.contextmanager
def shown(
    total_rows: int | None, enabled: bool = True, stream: TextIO | None = None, events: Events | None = None
) -> Iterator[Tally | None]:
    """Show progress while the block runs; yield the tally for the actors, None if not enabled. With enabled `events`,
    progress is emitted as events instead of a line."""
    if not enabled:
        yield None
        return
    stream = stream or sys.stderr
    events = events if events is not None and events.enabled else None
    terminal = stream.isatty() and events is None
    began_s = time.monotonic()
    num_rows_shown = 0
    with driver_actor(_TallyActor) as actor:

        def look() -> None:
            nonlocal num_rows_shown
            try:
                counts = Counts(*ray.get(actor.add.remote(0, 0, 0, 0), timeout=10))
            except ray.exceptions.GetTimeoutError:
                return  # a busy or stopped process; read again in the next round
            if not terminal and counts.num_rows == num_rows_shown:
                return
            num_rows_shown = counts.num_rows
            if events is not None:
                events.emit("progress", stream=stream, total_rows=total_rows, **asdict(counts))
                return
            line = progress_line(counts, total_rows, time.monotonic() - began_s)
            stream.write(f"\r\x1b[K{bar(counts.num_rows, total_rows)} {line}" if terminal else f"{line}\n")
            stream.flush()

        def report(*counts: int) -> None:
            actor.add.remote(*counts)  # without waiting for an answer

        try:
            with polled(look, TERMINAL_INTERVAL_S if terminal else QUIET_INTERVAL_S, "progress", last_look=True):
                yield report
        finally:
            if terminal:
                stream.write("\n")


def bar(num_rows: int, total_rows: int | None) -> str:
    """Return a progress bar of fixed width, such as `[#####-----]`; empty if the total is unknown."""
    if not total_rows:
        return ""
    filled = min(BAR_WIDTH, BAR_WIDTH * num_rows // total_rows)
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]"


def progress_line(counts: Counts, total_rows: int | None, elapsed_s: float) -> str:
    """Return one line with the rows done, rates since the start, and the mean acceptance length so far."""
    elapsed_s = max(elapsed_s, 1e-9)
    of_total = f" of {total_rows}" if total_rows is not None else ""
    line = f"{counts.num_rows}{of_total} rows, {counts.num_rows / elapsed_s:.1f} rows/s, "
    line += f"{counts.num_tokens / elapsed_s:,.0f} tokens/s"
    if counts.num_accepted:
        line += f", acceptance length {1 + counts.num_accepted / counts.num_steps:.2f}"
    return line
