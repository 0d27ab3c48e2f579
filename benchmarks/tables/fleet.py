"""Computes what a fleet takes from the measured cost of each part: drivers, cores, requests, memory and hours."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.markdown import Results

MAX_BATCH_ROWS, MAX_BATCH_IMAGES = 512, 128
"""Those of `pipeline.run.job_plan`, which is not imported: `benchmarks.gpu` renders tables without pydantic."""

DRIVER_SHARE = 0.5
"""Share of one core that a driver is planned to use; the rest is reserve."""
BATCHES = {"captions": 1.0, "images": 7 / 4}
"""Tasks of a batch relative to captions, whose batches pass four stages; those of images pass seven."""


@dataclass(frozen=True)
class Fleet:
    """Engines that make `kind` rows; a batch has `batch_rows` rows."""

    kind: str
    num_engines: int
    rows_per_s_each: float
    num_rows: int
    batch_rows: int

    @property
    def rows_per_s(self) -> float:
        return self.num_engines * self.rows_per_s_each


FLEETS = (
    Fleet("captions", 1_000, 20.0, 10**9, MAX_BATCH_ROWS),
    Fleet("captions", 2_500, 20.0, 10**9, MAX_BATCH_ROWS),
    Fleet("images", 1_000, 15.0, 10**9, MAX_BATCH_IMAGES),
)


def needs_of(fleet: Fleet, results: Results) -> Results:
    """Return what the fleet takes, by name; drivers may be a fraction."""
    writers = [row for row in results["writer"] if row["kind"] == fleet.kind]
    one_task = next(row for row in writers if row["num_tasks"] == 1)
    ledger = min(results["ledger"], key=lambda row: abs(row["rows"] - fleet.batch_rows))
    costs, factor = results["driver"], BATCHES[fleet.kind]
    per_batch, spare = costs["cpu_ms_per_batch"], DRIVER_SHARE - costs["cpu_s_per_s"]["driver"]
    batches_per_s, files_per_s = fleet.rows_per_s / fleet.batch_rows, fleet.rows_per_s / one_task["rows_per_file"]
    return {
        "hours": fleet.num_rows / fleet.rows_per_s / 3600,
        "drivers_by_cpu": factor * batches_per_s * per_batch["driver"] / 1000 / spare,
        "drivers_by_ledger": batches_per_s / ledger["batches_per_s"],
        "drivers_by_writer": fleet.rows_per_s / max(row["rows_per_s"] for row in writers),
        "gcs_cores": factor * batches_per_s * per_batch["gcs_server"] / 1000,
        "writer_cores": fleet.rows_per_s * one_task["task_cpu_us_per_row"] / 1e6,
        "mb_per_s": fleet.rows_per_s * one_task["bytes_per_row"] / 1e6,
        "files": fleet.num_rows / one_task["rows_per_file"],
        "puts_per_s": files_per_s * one_task["objects_per_file"],
    }


def rows_per_s_of_a_driver(costs: Results, batch_rows: int) -> float:
    """Return the rate at which the driver uses one core."""
    return float((1.0 - costs["cpu_s_per_s"]["driver"]) * batch_rows * 1000 / costs["cpu_ms_per_batch"]["driver"])
