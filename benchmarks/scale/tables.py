"""Names the tables of the documents that show `results/scale.json`."""

from __future__ import annotations

from benchmarks.harness.markdown import Results
from benchmarks.scale import driver, model, planner, writer


def planner_table(results: Results) -> str:
    return planner.planner_table(results["planner"])


TABLES = {
    "scale_driver": driver.cost_table,
    "scale_fleets": driver.fleet_table,
    "scale_writer": writer.writer_table,
    "scale_ledger": writer.ledger_table,
    "scale_planner": planner_table,
    "scale_model": model.model_table,
}
