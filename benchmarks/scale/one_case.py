"""Runs one case of `benchmarks.scale.before` in this process and prints its figures as JSON.

    python -m benchmarks.scale.one_case [--adapt] PART ARGUMENTS    # ARGUMENTS is a JSON array

`--adapt` is for the packages of the commit before the data plane (`benchmarks.scale.adapter`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale import adapter


def run_part(part: str, arguments: list[Any]) -> Any:
    """Run a case of one part, and return its figures. Imports follow `adapter.install`."""
    from benchmarks.scale import driver, planner, writer
    from configs.pool import Job
    from pipeline.cluster.ray_session import session

    if part == "driver":
        return driver.run_case(driver.Case(*arguments))
    if part in ("prepare", "planner"):
        number, num_files, rows_per_file, folder = arguments
        case = replace(planner.CASES[number], num_files=num_files, rows_per_file=rows_per_file)
        if part == "planner":
            return planner.run_case(case, Path(folder))
        return case.prepare(Path(folder), case)
    with tempfile.TemporaryDirectory() as name, session(Job(num_cpus=2)):
        if part == "ledger":
            return writer.measure_ledger()
        kind, num_tasks = arguments
        return writer.measure_writer(kind, num_tasks, Path(name, "out"))


def main(arguments: list[str]) -> int:
    if arguments[0] == "--adapt":
        adapter.install()
        del arguments[0]
    part, given = arguments
    print(json.dumps(run_part(part, json.loads(given))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
