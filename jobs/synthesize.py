"""`python -m jobs.synthesize`: run one synthesis job from a YAML file; write images and telemetry of all prompts."""

from __future__ import annotations

import functools
import sys

from ray.data import Dataset

from configs.synthesis import SynthesizeJobConfig
from jobs.export import export_results
from jobs.terminal.command import Command
from jobs.terminal.exit_status import JOB, in_help
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import IMAGE_ROWS_PER_GROUP
from pipeline.run.execution import run_job
from pipeline.run.graph import ImageStages, RunContext, synthesis_dataset
from pipeline.storage import checkpoints
from pipeline.synthesis import rows
from pipeline.synthesis.files import encode_table
from pipeline.synthesis.plan import SynthesisPlan, describe, first_prompt, make_plan
from pipeline.synthesis.prompts import prepare_table


def run(plan: SynthesisPlan) -> Summary:
    """Run the remaining work of a plan under Ray, write `_job/`, and return the summary of the whole output. Raises
    the errors of `run_graph`."""
    return run_job(plan, results, IMAGE_ROWS_PER_GROUP)


def results(plan: SynthesisPlan, run: RunContext) -> Dataset:
    """Build the Ray dataset of the rows that the job writes."""
    config = plan.config
    stages = ImageStages(
        functools.partial(prepare_table, options=plan.prepare_options),
        functools.partial(encode_table, file=config.image, keep_codes=config.sink.keep_codes),
        rows.coded_schema(plan.kept),
        rows.painted_schema(plan.kept),
        plan.present_ids,
        checkpoints.load_pair,
        checkpoints.load_painter,
    )
    return synthesis_dataset(config, plan.datasource, plan.datasource.num_spans, stages, run)


COMMAND = Command(
    name="synthesize",
    verb="synthesising images of the prompts in",
    doc=f"{__doc__}\n\n{in_help(JOB)}",
    model=SynthesizeJobConfig,
    example="zoo_images_plain sink.path=out/images --limit 8",
    make_plan=make_plan,
    describe=lambda plan: [describe(plan), first_prompt(plan)],
    run=run,
    build=results,
    export=export_results,
)
main, parser = COMMAND.main, COMMAND.parser


if __name__ == "__main__":
    sys.exit(main())
