"""The fit of the driver's CPU time, and the model of fleets that is computed from it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scale import driver
from benchmarks.tables import fleet as model
from benchmarks.tables.fleet import Fleet, needs_of
from pipeline.run import job_plan

PER_S, PER_BATCH_S = 0.1, 0.004


def cell(batch_rows: int, num_rows: int, wall_s: float) -> dict[str, Any]:
    spent_s = PER_S * wall_s + PER_BATCH_S * num_rows / batch_rows
    cpu_s = {"driver": spent_s, **dict.fromkeys(driver.HEAD, 2 * spent_s)}
    return {"batch_rows": batch_rows, "num_rows": num_rows, "wall_s": wall_s, "cpu_s": cpu_s}


def test_the_fit_separates_fixed_seconds_from_seconds_per_batch() -> None:
    fit = driver.fit([cell(32, 40_000, 90.0), cell(512, 200_000, 60.0)])
    assert fit["cpu_s_per_s"] == pytest.approx({"driver": 0.1, "gcs_server": 0.2, "raylet": 0.2})
    assert fit["cpu_ms_per_batch"] == pytest.approx({"driver": 4.0, "gcs_server": 8.0, "raylet": 8.0})


def test_the_model_gives_the_requirements_of_a_fleet() -> None:
    writer = {"num_tasks": 1, "rows_per_s": 10_000.0, "bytes_per_row": 1e3, "task_cpu_us_per_row": 5.0}
    results = {
        "driver": driver.fit([cell(32, 40_000, 90.0), cell(512, 200_000, 60.0)]),
        "writer": [{"kind": kind, **writer, "objects_per_file": 2.0, "rows_per_file": 1000} for kind in model.BATCHES],
        "ledger": [{"rows": 32, "batches_per_s": 1000.0}, {"rows": 512, "batches_per_s": 100.0}],
    }
    captions = needs_of(Fleet("captions", 1000, 20.0, 10**9, 500), results)
    assert captions == pytest.approx(
        {
            "hours": 10**9 / 20_000 / 3600,
            "drivers_by_cpu": 40 * 0.004 / (model.DRIVER_SHARE - 0.1),  # 40 batches/s
            "drivers_by_ledger": 0.4,
            "drivers_by_writer": 2.0,
            "gcs_cores": 40 * 0.008,
            "writer_cores": 0.1,
            "mb_per_s": 20.0,
            "files": 10**6,
            "puts_per_s": 40.0,
        }
    )
    images = needs_of(Fleet("images", 1000, 20.0, 10**9, 500), results)
    assert images["drivers_by_cpu"] == pytest.approx(model.BATCHES["images"] * captions["drivers_by_cpu"])


def test_batches_of_the_model_are_those_of_jobs() -> None:
    assert (model.MAX_BATCH_ROWS, model.MAX_BATCH_IMAGES) == (job_plan.MAX_BATCH_ROWS, job_plan.MAX_BATCH_IMAGES)


@pytest.mark.slow
def test_a_paced_job_writes_every_row() -> None:
    row = driver.run_case(driver.Case(num_actors=2, num_rows=300, rows_per_s=10_000.0, batch_rows=32))
    assert row["num_files"] >= 1
    assert row["wall_s"] > 0
    assert row["cpu_s"]["driver"] > 0
    assert 0 <= row["engine_wait_share"] <= 1
