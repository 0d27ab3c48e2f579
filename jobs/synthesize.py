"""`python -m jobs.synthesize`: run one synthesis job from a YAML file; write images and telemetry of all prompts.

Exit status: 0 done, 1 the job failed, 2 refused (one message, nothing was started), 3 ended because too many rows
failed, 143 and 130 stopped by SIGTERM and SIGINT with finished rows saved.
"""

from __future__ import annotations

import functools
import sys

from ray.data import Dataset

from actors.results import Stamp, Tally
from actors.serving.engine_thread import ReportWaits
from configs.synthesis import SynthesizeJob
from jobs.command import Command
from pipeline.cluster.partitions import Workers
from pipeline.media.image_decoding import decode_image
from pipeline.reports import preview, summary
from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.rows.schemas import IMAGE_ROWS_PER_GROUP
from pipeline.run.crash_ledger import CrashLedger
from pipeline.run.execution import close, run_graph
from pipeline.run.graph import synthesis_dataset
from pipeline.storage import checkpoints
from pipeline.storage.output_dir import DATA, ERRORS
from pipeline.synthesis import rows
from pipeline.synthesis.files import encode_table
from pipeline.synthesis.plan import SynthesisPlan, describe, first_prompt, make_plan
from pipeline.synthesis.prompts import prepare_table
from pipeline.synthesis.summary import ImageSummary


def run(plan: SynthesisPlan) -> ImageSummary:
    """Run the remaining work of a plan under Ray, write `_job/`, and return the summary of the whole output. Raises
    the errors of `run_graph`."""
    method = plan.config.method
    wall_s, waits, publisher = run_graph(plan, results, IMAGE_ROWS_PER_GROUP)
    empty = ImageSummary(plan.job_id, method.label, method.verify_mode, max(wall_s, 1e-9), waits)
    with Workers(plan.config.job) as workers:
        done = summary.count(plan.output, empty, workers)
    close(plan, done, functools.partial(preview_page, plan), publisher)
    return done


def results(
    plan: SynthesisPlan, stamp: Stamp, tally: Tally | None, flow: ReportWaits, log: CrashLedger | None = None
) -> Dataset:
    """Build the Ray dataset of the rows that the job writes."""
    config = plan.config
    return synthesis_dataset(
        config,
        plan.datasource,
        plan.datasource.num_spans,
        functools.partial(prepare_table, options=plan.prepare_options),
        functools.partial(encode_table, file=config.image, keep_codes=config.sink.keep_codes),
        (rows.coded_schema(plan.kept), rows.painted_schema(plan.kept)),
        stamp,
        load=checkpoints.load_pair,
        load_painter=checkpoints.load_painter,
        tally=tally,
        flow=flow,
        log=log,
        present=plan.present_ids,
    )


def preview_page(plan: SynthesisPlan) -> str:
    """Return the HTML preview of the images of a limited run, in the order of the source."""
    prompts = plan.prepare_first(min(plan.limit or preview.MAX_ROWS, preview.MAX_ROWS))
    place = {sample_id: index for index, sample_id in enumerate(prompts.column("sample_id").to_pylist())}
    columns = [name for name in plan.schema.names if name != "codes" and name not in plan.config.sink.keep_columns]
    names = list_tables(plan.output, (DATA, ERRORS))
    rows = [row for table in read_tables(plan.output, names, columns) for row in table.to_pylist()]
    rows.sort(key=lambda row: (place.get(row["prompt_id"], len(place)), row["replica"]))
    del rows[preview.MAX_ROWS + 1 :]
    images = {
        row["sample_id"]: [decode_image(row["image"]["bytes"], max_pixels=row["width_px"] * row["height_px"])]
        for row in rows
        if row.get("image")
    }
    note = f"{plan.num_results or len(rows)} images · {plan.config.method.label} · target {plan.pair.target_id}"
    for row in rows:
        row["generated_text"] = row["prompt"] or (f"class {row['label']}" if row["label"] is not None else "")
    return preview.render_page(plan.job_id, note, rows, images)


COMMAND = Command(
    module="jobs.synthesize",
    verb="synthesising images of the prompts in",
    doc=__doc__ or "",
    model=SynthesizeJob,
    make_plan=make_plan,
    describe=lambda plan: [describe(plan), first_prompt(plan)],
    run=run,
    build=results,
)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
