"""`python -m jobs.caption JOB`: run one caption job from a YAML file; write captions and telemetry of all rows."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

from ray.data import Dataset

from actors.generate import Generate
from actors.serving.crash_ledger import LossBudgetExceeded
from configs.schema import CaptionJobConfig
from jobs.export import export_results as export
from jobs.terminal.command import Command
from jobs.terminal.exit_status import AUDITED_JOB, DONE, FAILED, REFUSED, in_help
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.reports.summary import Summary
from pipeline.run.execution import run_job
from pipeline.run.graph import (
    MAX_CALLS_PER_WORKER,
    MAX_PROCESSOR_CALLS_PER_WORKER,
    CaptionStages,
    RunContext,
    caption_dataset,
)
from pipeline.run.plan import Plan, make_plan
from pipeline.run.plan_text import describe, first_prompt
from pipeline.storage import checkpoints

__all__ = ["DONE", "FAILED", "REFUSED", "export", "main", "run"]


def run(plan: Plan) -> Summary:
    """Run the remaining work of a plan under Ray, write `_job/`, and return the summary of the whole output. Raises
    the errors of `run_graph`."""
    audit = plan.config.audit
    try:
        return run_job(plan, results)
    except LossBudgetExceeded as error:
        if audit is None or audit.on_exceeded == "stop":
            raise
        print(f"{error}; the rows that are left are decoded losslessly", flush=True)
        return run_job(plan.lossless(), results)


def results(plan: Plan, run: RunContext, actor: type[Generate] = Generate, **options: Any) -> Dataset:
    """Build the Ray dataset of the rows that the job writes; `actor` and `options` as in `CaptionStages`."""
    several = plan.config.sampling.num_captions_per_prompt > 1  # then actors make rows of samples
    if several:
        options["present"] = plan.present_ids
    stages = CaptionStages(
        functools.partial(
            decode_table, options=decode_options(plan), present=frozenset() if several else plan.present_ids
        ),
        plan.schema,
        checkpoints.load_pair,
        plan.weigher,
        MAX_CALLS_PER_WORKER if plan.processing is None else MAX_PROCESSOR_CALLS_PER_WORKER,
        actor,
        options,
    )
    return caption_dataset(plan.config, plan.datasource, plan.datasource.num_spans, stages, run)


def decode_options(plan: Plan) -> DecodeOptions:
    """Return the options of decoding tasks; a processor that they run is put into Ray's object store."""
    if plan.processing is None:
        return plan.decode_options
    return replace(plan.decode_options, processor=plan.processing.for_tasks(plan.config))


COMMAND = Command(
    name="caption",
    verb="captioning",
    doc=f"{__doc__}\n\n{in_help(AUDITED_JOB)}",
    model=CaptionJobConfig,
    example="demo_folder source.path=PICTURES sink.path=out/mine --limit 20",
    make_plan=make_plan,
    describe=lambda plan: [describe(plan), first_prompt(plan)],
    run=run,
    build=results,
    export=export,
)
main, parser = COMMAND.main, COMMAND.parser


if __name__ == "__main__":
    sys.exit(main())
