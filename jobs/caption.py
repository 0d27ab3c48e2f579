"""`python -m jobs.caption`: run one caption job from a YAML file; write captions and telemetry of all source rows.

Exit status: 0 done, 1 the job failed, 2 refused (one message, nothing was started), 3 ended because too many rows
failed, 4 ended because the loss of audited rows exceeded audit.max_loss, 143 and 130 stopped by SIGTERM and SIGINT with
finished rows saved.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

from ray.data import Dataset

from actors.generate import Generate
from actors.media import media_rows
from actors.results import Stamp, Tally
from actors.serving.engine_thread import ReportWaits
from actors.serving.journal import LossBudgetExceeded
from configs.schema import CaptionJob
from jobs.command import DONE, FAILED, REFUSED, Command
from pipeline.cluster.partitions import Workers
from pipeline.exports.run import run_exports
from pipeline.media.image_decoding import DecodeOptions, decode_table, pixels
from pipeline.media.video.clips import some_frames
from pipeline.reports import preview, summary
from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.run.crash_ledger import CrashLedger
from pipeline.run.execution import close, run_graph
from pipeline.run.graph import MAX_CALLS_PER_WORKER, MAX_PROCESSOR_CALLS_PER_WORKER, caption_dataset
from pipeline.run.plan import Plan, make_plan, recorded
from pipeline.run.plan_text import describe, first_prompt
from pipeline.storage import checkpoints
from pipeline.storage.output_dir import DATA, ERRORS

NUM_FRAMES = preview.MAX_IMAGES_PER_ROW
"""Frames of a row's clips that the preview shows."""
PREVIEW_AT_ONCE = 8
"""Samples that are decoded together for the preview."""

__all__ = ["DONE", "FAILED", "REFUSED", "main", "run"]


def run(plan: Plan) -> summary.Summary:
    """Run the remaining work of a plan under Ray, write `_job/`, and return the summary of the whole output. Raises
    the errors of `run_graph`."""
    audit, method = plan.config.audit, plan.config.method
    try:
        wall_s, waits, publisher = run_graph(plan, results)
    except LossBudgetExceeded as error:
        if audit is None or audit.on_exceeded == "stop":
            raise
        print(f"{error}; the rows that are left are decoded losslessly", flush=True)
        plan = plan.lossless()
        wall_s, waits, publisher = run_graph(plan, results)
    empty = summary.Summary(plan.job_id, method.label, method.verify_mode, max(wall_s, 1e-9), waits, audit=audit)
    with Workers(plan.config.job) as workers:
        done = summary.count(plan.output, empty, workers)
    close(plan, done, functools.partial(preview_page, plan), publisher)
    return done


def results(
    plan: Plan,
    stamp: Stamp,
    tally: Tally | None,
    flow: ReportWaits,
    log: CrashLedger | None = None,
    actor: type[Generate] = Generate,
    **options: Any,
) -> Dataset:
    """Build the Ray dataset of the rows that the job writes; `actor` and `options` as for `caption_dataset`."""
    max_calls = MAX_CALLS_PER_WORKER if plan.processing is None else MAX_PROCESSOR_CALLS_PER_WORKER
    return caption_dataset(
        plan.config,
        plan.datasource,
        plan.datasource.num_spans,
        functools.partial(decode_table, options=decode_options(plan), present=plan.present_ids),
        plan.schema,
        stamp,
        load=checkpoints.load_pair,
        tally=tally,
        flow=flow,
        log=log,
        weigher=plan.weigher,
        max_calls=max_calls,
        actor=actor,
        options=options,
    )


def decode_options(plan: Plan) -> DecodeOptions:
    """Return the options of decoding tasks; a processor that they run is put into Ray's object store."""
    if plan.processing is None:
        return plan.decode_options
    return replace(plan.decode_options, processor=plan.processing.for_tasks(plan.config))


def preview_page(plan: Plan) -> str:
    """Return the HTML preview of the samples of a limited run, in the order of the source."""
    images = {}
    limit = min(plan.limit or preview.MAX_ROWS, preview.MAX_ROWS)
    for decoded in plan.decode_first(limit, PREVIEW_AT_ONCE, preview.SIDE_PX):
        shown, clips = decoded.column("images").to_pylist(), decoded.column("videos").to_pylist()
        for sample_id, row in zip(decoded.column("sample_id").to_pylist(), media_rows(decoded), strict=True):
            both = (*pixels(shown[row]), *some_frames(clips[row], NUM_FRAMES))
            images[sample_id] = both[: preview.MAX_IMAGES_PER_ROW]
    place = {sample_id: index for index, sample_id in enumerate(images)}
    columns = [name for name in plan.schema.names if name not in plan.manifest.keep.names]
    names = list_tables(plan.output, (DATA, ERRORS))
    rows = [row for table in read_tables(plan.output, names, columns) for row in table.to_pylist()]
    rows.sort(key=lambda row: place.get(row["sample_id"], len(place)))
    note = f"{len(rows)} samples · {plan.config.method.label} · target {plan.pair.target_id}"
    return preview.render_page(plan.job_id, note, rows, images)


def export(plan: Plan) -> list[str]:
    """Run `sink.exports`; return the lines of their reports."""
    config = plan.config
    reports = run_exports(recorded(plan), config.sink.exports, config.job, "sink.exports")
    return [f"export        {line}" for report in reports for line in report.lines()]


COMMAND = Command(
    module="jobs.caption",
    verb="captioning",
    doc=__doc__ or "",
    model=CaptionJob,
    make_plan=make_plan,
    describe=lambda plan: [describe(plan), first_prompt(plan)],
    run=run,
    build=results,
    export=export,
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
