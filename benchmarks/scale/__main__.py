"""Measures the parts of a job that all actors share, and computes what a fleet takes from these figures.

    python -m benchmarks.scale                        # all parts; writes results/scale.json; an hour on two cores
    python -m benchmarks.scale --only driver          # one part; the others are kept

Parts: `writer` publishes blocks from the object store to a local folder, with one, two and four tasks at a time.
`ledger` records batches of clients in tasks. `driver` runs jobs over text rows with engines that return at once.
`fleets` runs 1 to 64 actors whose engines sleep. `planner` lists, counts and compares ids (two gigabytes of files).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import Results
from benchmarks.harness.results import command_line, machine, progress, read_results, results_file, write_results
from benchmarks.scale import driver, planner, writer
from benchmarks.tables.parts import show
from configs.pool import JobSectionConfig
from pipeline.cluster.ray_session import session

RESULTS = results_file("scale")


def measure_writers() -> list[Results]:
    results = []
    with tempfile.TemporaryDirectory() as name, session(JobSectionConfig(num_cpus=2)):
        for kind in writer.BLOCKS:
            for num_tasks in writer.NUM_TASKS:
                results.append(writer.measure_writer(kind, num_tasks, Path(name, f"{kind}-{num_tasks}")))
                progress(results[-1])
    return results


def measure_ledger() -> list[Results]:
    with session(JobSectionConfig(num_cpus=2)):
        return writer.measure_ledger()


PARTS: dict[str, Callable[[], Any]] = {
    "writer": measure_writers,
    "ledger": measure_ledger,
    "driver": driver.measure_costs,
    "fleets": driver.measure_fleets,
    "planner": lambda: planner.measure_planner((*planner.CASES, planner.GOAL)),
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("scale", __doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run one part (may be repeated)")
    options = parser.parse_args(arguments)
    results = read_results(RESULTS) if RESULTS.exists() else {}
    for name in options.only or PARTS:
        results["machine"] = machine()
        results[name] = PARTS[name]()
        write_results(RESULTS, results)
        print(show("scale", results, f"scale_{name}"), flush=True)
    if all(name in results for name in PARTS):
        print(show("scale", results, "scale_model"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
