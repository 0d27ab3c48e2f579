"""Running a checked job: the attempt taken, provenance written, the graph run under Ray, every row accounted for.

What is the same for every kind of job; which graph, which summary and which preview is told by the job. Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import yaml
from ray.data import Dataset

from actors.engine_thread import ReportWaits, Waits
from actors.results import Stamp, Tally
from pipeline import flow, progress, ray_session
from pipeline.datasink import ParquetSink
from pipeline.plan import JobPlan
from pipeline.provenance import code_revision, versions
from pipeline.summary import Summary

Build = Callable[[Stamp, Tally | None, ReportWaits], Dataset]
"""From what rows say about the run, and where actors report, to the dataset of results."""


def run_graph(plan: JobPlan, build: Build, rows_per_group: int | None = None) -> tuple[float, Waits]:
    """Take the attempt, write `_job/`, and run the graph.

    Returns the seconds from the first task to the last file, and who waited for whom meanwhile.

    Raises:
        ConfigError: another job has taken the output meanwhile.
    """
    attempt = plan.output.take_attempt(opening_record(plan))
    plan.manifest.write(plan.output)
    write_provenance(plan)
    config = plan.config
    kept = [field for field in plan.schema if field.name in config.sink.keep_columns]
    sink = ParquetSink(plan.output, config.sink, plan.job_id, attempt, kept, plan.schema, rows_per_group)
    shown = progress.shown(plan.num_results, config.job.progress)
    with ray_session.session(config.job), flow.measured() as waits, shown as tally:
        dataset = build(plan.stamp(attempt), tally, waits.report)
        began_s = time.monotonic()
        dataset.write_datasink(sink)
        return time.monotonic() - began_s, waits.total()


def close(plan: JobPlan, done: Summary, preview: Callable[[], str]) -> None:
    """Check that every row is there, write the summary, and the preview of a limited run.

    Raises:
        RuntimeError: rows are missing from the output.
    """
    check_accounted(plan, done)
    plan.output.write_json("_job/summary.json", done.to_json())
    if plan.limit is not None:
        plan.output.write_bytes("_job/preview.html", preview().encode())


def opening_record(plan: JobPlan) -> dict[str, Any]:
    """What `_job/attempts/` keeps of a run that begins."""
    return {
        "job_id": plan.job_id,
        "config_fingerprint": plan.fingerprint,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_revision": code_revision(),
        "limit": plan.limit,
    }


def write_provenance(plan: JobPlan) -> None:
    """Write the resolved configuration and the versions into `_job/`."""
    text = yaml.safe_dump(plan.config.resolved(), sort_keys=False, allow_unicode=True)
    plan.output.write_bytes("_job/config.yaml", text.encode())
    record = {**versions(), "code_revision": code_revision(), "model_revisions": plan.pair.revisions}
    plan.output.write_json("_job/versions.json", record)


def check_accounted(plan: JobPlan, done: Summary) -> None:
    """Refuse to call a job done whose output does not hold every row that was planned."""
    where = plan.output.shown()
    expected = plan.num_results
    if expected is not None and done.num_samples != expected:
        raise RuntimeError(f"{expected} rows were planned and {done.num_samples} are in {where}")
    inputs = plan.datasource.num_samples
    if expected is None and inputs is not None and done.num_inputs != inputs:
        raise RuntimeError(f"{inputs} samples were planned and rows of {done.num_inputs} are in {where}")
    if done.num_missing_clips:
        raise RuntimeError(f"{done.num_missing_clips} clips of videos are missing in {where}")
