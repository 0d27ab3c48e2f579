"""Runs the pilot of a job: decodes its samples with plain decoding and the job's methods, on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from ray.data import Dataset

from actors.results import torch_threads
from pipeline.cluster import ray_session
from pipeline.pilot.estimate import Pilot
from pipeline.pilot.verdict import PilotVerdict, judge, methods_of, pilot_method, pilot_pool
from pipeline.run.execution import open_dataset, tables_of
from pipeline.run.graph import Build
from pipeline.run.job_plan import JobPlan


def run_pilot(plan: JobPlan, build: Build, pilot: Pilot) -> tuple[pa.Table, PilotVerdict | None]:
    """Run the graph of `build` on a pilot's samples, with a trial of plain decoding and the job's methods on one
    engine; return the results, and the verdict if there were enough rows. The output directory is not touched."""
    pool = pilot_pool(plan.config.pool, torch_threads(plan.config.pool))
    slots = None if pool.slots == "auto" else pool.slots
    num_rows = pilot.size * pilot.repeats * (plan.rows_per_sample or 1)
    method = pilot_method(plan.config.method, slots, num_rows)
    trial = replace(plan, config=plan.config.model_copy(update={"method": method, "pool": pool}))
    with (
        ray_session.session(plan.config.job),
        open_dataset(trial, build, pilot.datasource, pilot.size * pilot.repeats, None) as (dataset, waits),
    ):
        rows = pa.concat_tables(tables_of(dataset)).combine_chunks()
        total, media_s = waits.total(), stage_seconds(dataset, "decode")
    if not total.choices:
        return rows, None
    encoding = "processor and vision tower" if plan.processes_in_actors else "vision tower"
    per_row = None if media_s is None else media_s / max(1, rows.num_rows)
    return rows, judge(total.choices[0], methods_of(plan.config), encoding, per_row, total.actors_waited)


def stage_seconds(dataset: Dataset, name: str) -> float | None:
    """Return the wall seconds of all tasks of a stage of an executed dataset (`pipeline.run.graph`); None if it has
    none."""

    def operators(summary: Any) -> Iterator[Any]:
        for parent in summary.parents:
            yield from operators(parent)
        yield from summary.operators_stats

    seconds = [op.wall_time.sum for op in operators(dataset.get_stats_summary()) if f"({name})" in op.operator_name]
    return sum(seconds) if seconds else None
