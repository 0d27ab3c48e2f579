"""Runs a pilot: some samples through a job's own graph, whose rows return to the driver and are not written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyarrow as pa
from ray.data import Dataset

from actors.results import Stamp, Tally
from actors.serving.engine_thread import ReportWaits
from pipeline.cluster import ray_session
from pipeline.reports import progress
from pipeline.run import wait_times
from pipeline.run.estimate import Pilot
from pipeline.run.plan import JobPlan

Build = Callable[[JobPlan, Stamp, Tally | None, ReportWaits], Dataset]


def run_pilot(plan: JobPlan, build: Build, pilot: Pilot) -> pa.Table:
    """The results of a pilot's samples, by the graph that `build` makes of the plan; the output is not touched."""
    job = plan.config.job
    over_pilot = copy.copy(plan)
    vars(over_pilot)["datasource"] = pilot.datasource  # in place of the cached one
    with (
        ray_session.session(job),
        wait_times.measured() as waits,
        progress.shown(None, job.progress) as tally,
    ):
        dataset = build(over_pilot, plan.stamp(0), tally, waits.report)
        tables = list(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    return pa.concat_tables(tables).combine_chunks()
