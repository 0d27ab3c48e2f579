"""Runs a planned job of any kind: starts an attempt, runs the Ray Data graph, and publishes and checks its rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import yaml
from ray.data import Dataset

from actors.events import Events
from actors.losses import MetricError
from actors.serving.crash_ledger import EngineFailed, ErrorBudgetSpent, LossBudgetExceeded
from actors.serving.engine_thread import Waits
from pipeline.cluster import drain, ray_session, worker_logs
from pipeline.cluster.partitions import Workers
from pipeline.cluster.provenance import code_revision, versions
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.manifest_parts import broken_files
from pipeline.manifest.shards import rows_of
from pipeline.output.publishing import Publisher
from pipeline.output.recorded_job import SOURCE_FOLDER
from pipeline.output.writer import Writer, calls_in_ray
from pipeline.reports import loss
from pipeline.reports.live import Live
from pipeline.reports.loss import Losses, read_losses
from pipeline.reports.progress import open_progress
from pipeline.reports.result_tables import list_tables
from pipeline.reports.summary import Summary, count
from pipeline.run import crash_ledger, reporting, wait_times
from pipeline.run.crash_ledger import CrashLedgerClient
from pipeline.run.finalize import finalize
from pipeline.run.graph import Build, RunContext
from pipeline.run.job_plan import JobPlan
from pipeline.run.reporting import ReportWriter
from pipeline.run.resume import SUMMARY, AttemptState, begin, fingerprints_of, limit_text, resume_lines
from pipeline.storage import access
from pipeline.storage.folders import FolderId
from pipeline.storage.listing import describe_skipped
from pipeline.storage.output_dir import DATA, JOB, as_json


@dataclass(frozen=True)
class AttemptResult:
    """An attempt that has computed all rows: seconds from the first task to the last file, wait times, its publisher,
    and the counts of its rows, None if it computed none. `events` are emitted at its end, `began_s` is its start."""

    wall_s: float
    waits: Waits
    publisher: Publisher
    report: ReportWriter
    live: Live | None
    events: Events | None = None
    began_s: float = 0.0


def run_job(plan: JobPlan, build: Build, rows_per_group: int | None = None) -> Summary:
    """Run the remaining work of a plan under Ray, write `_job/`, and return the summary of the whole output. Raises the
    errors of `run_graph`."""
    result = run_graph(plan, build, rows_per_group)
    with Workers(plan.config.job) as workers:
        done = count(plan.output, plan.empty_summary(result.wall_s, result.waits), workers)
    close(plan, done, result)
    return done


def run_graph(plan: JobPlan, build: Build, rows_per_group: int | None = None) -> AttemptResult:
    """Start the next attempt, run the graph over the remaining work, write its rows, and finalize the output.

    Raises:
        ConfigError: another job has taken the attempt.
        Fenced: a later attempt has taken over.
        ErrorBudgetSpent: more rows have failed than `job.max_error_share` allows.
        EngineFailed: the models cannot be loaded, or every row ends the process of its engine.
        MetricError: the metric of the audit failed.
        LossBudgetExceeded: the loss of the audited rows exceeds `audit.max_loss`.
        RuntimeError: rows are missing from the output, or occur twice in it.
    """
    plan, attempt = begin(plan, opening_record(plan), rows_per_group)
    write_provenance(plan, attempt.publisher)
    for line in resume_lines(plan):
        print(line, flush=True)
    events = Events(plan.identity.stamp(attempt.publisher.attempt), plan.config.job.log == "json")
    report = ReportWriter(plan, attempt.publisher, _versions(plan), events)
    began_s = time.monotonic()
    with _emit_events(plan, events, began_s):
        wall_s, waits, live = _fill(plan, attempt, build, events, report)
        finalize(plan, attempt.publisher, fingerprints_of(plan.output), attempt.next_numbers)
    return AttemptResult(wall_s, waits, attempt.publisher, report, live, events, began_s)


@contextlib.contextmanager
def _emit_events(plan: JobPlan, events: Events, began_s: float) -> Iterator[None]:
    """Emit events at the start of the job, and if it ends before its rows are counted."""
    events.emit(
        "job_began",
        output=plan.output.shown(),
        num_files=plan.manifest.num_files,
        num_rows=plan.num_results,
        method=plan.config.method.label,
        target=plan.pair.target_id,
        drafter=plan.pair.drafter_id,
    )
    try:
        yield
    except KeyboardInterrupt:
        events.emit("job_stopped", "warning", wall_s=round(time.monotonic() - began_s, 3))
        raise
    except BaseException as error:
        events.emit("job_failed", "error", error=type(error).__name__, message=str(error))
        raise


def _fill(
    plan: JobPlan, attempt: AttemptState, build: Build, events: Events, report: ReportWriter
) -> tuple[float, Waits, Live | None]:
    """Compute and publish the missing rows, publish spooled rows, and return the fields of `AttemptResult`."""
    job, sink = plan.config.job, plan.config.sink
    waiting = plan.prior.inventory.spooled if plan.prior else []
    if not plan.datasource.num_spans:  # the last attempt made all rows, and was killed before it published them
        with Writer(attempt.publisher, sink, waiting, attempt.next_numbers):
            return 0.0, Waits(), None
    audit, losses = plan.audit, Losses()
    if audit is not None:
        names = [*list_tables(plan.output, (DATA,)), *(file.relative for file in waiting if file.folder == DATA)]
        with Workers(job) as workers:
            losses = read_losses(plan.output, names, workers)
        if exceeded := loss.verdict(audit, losses):
            raise LossBudgetExceeded(exceeded)
    with (
        worker_logs.open_console(plan.output, attempt.publisher.attempt, events) as console,
        ray_session.session(job, console=console),
        wait_times.collect_waits() as waits,
        crash_ledger.open_ledger(job.max_error_share, job.error_share_min_rows, audit, losses) as ledger,
        open_progress(plan.num_results, job.progress, None, events, plan.empty_summary(), job.drift) as progress,
        reporting.write_reports(report, progress.live, waits.total),
    ):
        dataset = build(
            plan, RunContext(plan.identity.stamp(attempt.publisher.attempt), progress, waits.report, ledger)
        )
        began_s = time.monotonic()
        with (
            job_error(ledger),
            Writer(attempt.publisher, sink, waiting, attempt.next_numbers, calls_in_ray()) as writer,
            drain.watch_drains(drain.Drains(ledger.spare, writer.hurry, events)),
        ):
            for bundle in dataset.iter_internal_ref_bundles():
                writer.add(bundle.block_refs, bundle.num_rows() or 0, bundle.size_bytes())
        return time.monotonic() - began_s, waits.total(), progress.live()


def stream(plan: JobPlan, build: Build, datasource: SpanDatasource, num_rows: int) -> Iterator[pa.Table]:
    """Run the graph of `build` on `num_rows` samples of a data source and yield its tables, as `open_dataset`."""
    with open_dataset(plan, build, datasource, num_rows, num_rows) as (dataset, _):
        yield from tables_of(dataset)


@contextlib.contextmanager
def open_dataset(
    plan: JobPlan, build: Build, datasource: SpanDatasource, num_samples: int, num_rows: int | None
) -> Iterator[tuple[Dataset, wait_times.WaitTimes]]:
    """Yield the dataset of `build` over the samples of a data source, and its wait times, under a Ray that has started;
    the output directory is not touched. `num_rows` is the number of results that progress shows. Raises the errors of
    `job_error`."""
    job = plan.config.job
    with (
        wait_times.collect_waits() as waits,
        crash_ledger.open_ledger(job.max_error_share, job.error_share_min_rows) as ledger,
        open_progress(num_rows, job.progress) as progress,
        job_error(ledger),
    ):
        run = RunContext(plan.identity.stamp(0), progress, waits.report, ledger)
        yield build(plan.reading(datasource, num_samples), run), waits


def tables_of(dataset: Dataset) -> Iterator[pa.Table]:
    """Run a dataset and yield its tables."""
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


@contextlib.contextmanager
def job_error(ledger: CrashLedgerClient) -> Iterator[None]:
    """Raise `ErrorBudgetSpent`, `LossBudgetExceeded` or `EngineFailed` in place of Ray's error if the ledger ended the
    job, or the `MetricError` that ended it."""
    try:
        yield
    except Exception:
        if failure := ledger.failure():
            raise MetricError(failure) from None
        if reason := ledger.engine_failure():
            raise EngineFailed(reason) from None
        if exceeded := ledger.loss_verdict():
            raise LossBudgetExceeded(exceeded) from None
        if verdict := ledger.verdict():
            raise ErrorBudgetSpent(verdict) from None
        raise


def close(plan: JobPlan, done: Summary, result: AttemptResult) -> None:
    """Judge the rows, and write `_job/summary.json`, with the work that a kill would lose, and the report."""
    pool, skipped = plan.config.pool, plan.manifest.skipped
    batches = pool.max_size * pool.max_batches_in_flight
    done.max_rows_in_flight = batches * pool.rows_per_batch * (plan.rows_per_sample or 1)
    done.max_unsaved_seconds = plan.config.sink.max_unsaved_seconds
    done.limited = limit_text(plan)
    done.skipped_files = describe_skipped(skipped, plan.config.source.kind) if skipped else ""
    shard, cuts = plan.output.shard.number, plan.manifest.cuts
    done.num_broken_files = sum(rows_of(cuts, shard, file) == (0, None) for file in broken_files(plan.output))
    if result.live is not None:
        done.drifts = [drift.text() for drift in result.live.drifts]
    verdict = done.judge(plan.config.job.max_error_share)
    result.publisher.write_job_file(f"{JOB}/{SUMMARY}", as_json(done.to_json()))
    result.report.write(lambda: result.report.done(done, result.live))
    result.publisher.check_alone()
    if result.events is not None and verdict.reason:
        result.events.emit("job_failed", "error", error=str(verdict.outcome), message=verdict.reason)
    elif result.events is not None:
        result.events.emit("job_done", wall_s=round(time.monotonic() - result.began_s, 3))


def opening_record(plan: JobPlan) -> dict[str, Any]:
    """Return the record of an attempt for `_job/attempts/`."""
    root = plan.manifest.root
    folder = None if access.uri_scheme(root) else FolderId.of(root)
    return {
        "job_id": plan.identity.job_id,
        "config_fingerprint": plan.identity.fingerprint,
        "content": plan.identity.content,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_revision": code_revision(),
        "limit": plan.limit,
        "config": plan.identity.recorded_config,
        "resources": plan.resources.record(),
        "versions": _versions(plan),
        SOURCE_FOLDER: None if folder is None else folder.to_json(),
    }


def write_provenance(plan: JobPlan, publisher: Publisher) -> None:
    """Write `_job/config.yaml` and `_job/versions.json`; the attempt's record contains the same values."""
    text = yaml.safe_dump(plan.identity.recorded_config, sort_keys=False, allow_unicode=True)
    publisher.write_job_file("_job/config.yaml", text.encode())
    publisher.write_job_file("_job/versions.json", as_json(_versions(plan)))


def _versions(plan: JobPlan) -> dict[str, Any]:
    code = {"external_code": dict(plan.external)} if plan.external else {}
    return {**versions(), "code_revision": code_revision(), "model_revisions": plan.pair.revisions, **code}
