"""Writes `_job/report.html` while a job runs and when it ends. A failure to write it never ends the job."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from actors.events import Events
from actors.serving.engine_thread import Waits
from pipeline.cluster.ray_session import poll
from pipeline.output.publishing import Publisher
from pipeline.reports.gallery import (
    MAX_ERRORS,
    MAX_ROWS,
    MAX_ROWS_LIMITED,
    Gallery,
    ResultRow,
    Shown,
    choose_rows,
    make_gallery,
)
from pipeline.reports.live import Live
from pipeline.reports.report import JobReport, render
from pipeline.reports.summary import Summary
from pipeline.run.job_plan import JobPlan
from pipeline.storage import access
from pipeline.storage.output_dir import JOB

REPORT = f"{JOB}/report.html"
INTERVAL_S = 30.0
MAX_SOURCES = 3
"""Maximum number of source paths in a report's title."""
PICTURES_S = 120.0
"""Longest time to read and decode images; further rows have none."""
NOTE_RUNNING = "Rows of this attempt so far; images are added when the job is done."


class ReportWriter:
    """Writes the report of one attempt; the first failure is shown, later ones are not."""

    def __init__(self, plan: JobPlan, publisher: Publisher, versions: dict[str, Any], events: Events) -> None:
        self._plan, self._publisher, self._versions, self._events = plan, publisher, versions, events
        self._began_s = time.monotonic()
        self._has_failed = False

    def write(self, make: Callable[[], JobReport]) -> None:
        """Render and write a report; an error is printed once."""
        try:
            self._publisher.write_job_file(REPORT, render(make()).encode("utf-8", "replace"), is_recorded=False)
        except Exception as error:  # damaged rows, full disks, stores out of reach
            if self._has_failed:
                return
            self._has_failed = True
            reason = access.reason_of(error)
            self._events.emit("report_failed", "warning", path=self._plan.output.shown(REPORT), reason=reason)
            if not self._events.enabled:
                where = self._plan.output.shown(REPORT)
                print(f"{where} cannot be written ({reason}); the job goes on", file=sys.stderr, flush=True)

    def running(self, live: Live, waits: Waits, state: str = "running") -> JobReport:
        """Return the report of the rows that this attempt has computed so far."""
        live.summary.wall_s, live.summary.waits = max(time.monotonic() - self._began_s, 1e-9), waits
        return self._report(live.summary, live, state, make_gallery(live.samples), NOTE_RUNNING)

    def done(self, summary: Summary, live: Live | None) -> JobReport:
        """Return the report of the whole output."""
        plan, is_limited = self._plan, self._plan.limit is not None
        most = (MAX_ROWS_LIMITED, MAX_ROWS_LIMITED) if is_limited else (MAX_ROWS, MAX_ERRORS)
        rows = choose_rows(plan.output, *most, plan.picture_columns)
        notes = ["The first rows." if is_limited else "The first rows of files spread over the output."]
        gallery = make_gallery(rows, partial(self._pictures, notes))
        state = "failed" if summary.verdict.reason else "done"
        return self._report(summary, live, state, gallery, " ".join(notes))

    def _pictures(self, notes: list[str], rows: Sequence[ResultRow]) -> Iterator[Shown]:
        """Yield images of rows, for at most `PICTURES_S` seconds; add a note if further rows have none."""
        until_s = time.monotonic() + PICTURES_S
        try:
            for picture in self._plan.pictures(rows):
                yield picture
                if time.monotonic() > until_s:
                    notes.append(f"Images of further rows were not read within {PICTURES_S:.0f} s.")
                    return
        except Exception as error:  # the source may be gone; the texts are shown without images
            notes.append(f"Images of further rows cannot be read: {access.reason_of(error)}.")

    def _report(self, summary: Summary, live: Live | None, state: str, gallery: Gallery, note: str) -> JobReport:
        plan = self._plan
        return JobReport(
            title=title_of(plan),
            job_id=plan.identity.job_id,
            output=plan.output.shown(),
            state=state,
            updated_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            summary=summary,
            total_rows=plan.num_results,
            live=live,
            gallery=gallery,
            gallery_note=note,
            config=plan.identity.recorded_config,
            versions=self._versions,
        )


def title_of(plan: JobPlan) -> str:
    """Return target, method and source of a job in a few words, such as `llava-1.5-7b, eagle2: photos`."""
    config = plan.config
    target = access.shown(config.model.target.path).rstrip("/").rpartition("/")[2]
    places = [access.shown(path).rstrip("/").rpartition("/")[2] for path in config.source.paths]
    source = ", ".join(places[:MAX_SOURCES]) + (", …" if len(places) > MAX_SOURCES else "")
    return f"{target}, {plan.identified.method.label}: {source}"


@contextlib.contextmanager
def write_reports(writer: ReportWriter, read: Callable[[], Live | None], waits: Callable[[], Waits]) -> Iterator[None]:
    """Write the report every `INTERVAL_S` seconds while the block runs, and once more if the block raises."""

    def write(state: str = "running") -> None:
        if (live := read()) is not None:
            writer.write(lambda: writer.running(live, waits(), state))

    try:
        with poll(write, INTERVAL_S, "report"):
            yield
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(Exception):  # the cluster may be gone; the job raises the cause
            write(f"{state} before all rows were done")
        raise
