"""Measures the CPU time of the driver and of Ray's head processes per row and per batch, with sleeping engines.

`python -m benchmarks.scale.driver CASE` runs one whole job, described by JSON, and prints its figures as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from benchmarks.harness.markdown import Results
from benchmarks.harness.paced import PacedPair
from benchmarks.harness.results import progress
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from pipeline.cluster.partitions import IN_PROCESS
from pipeline.cluster.ray_session import session
from pipeline.manifest.freezing import freeze_for, needs_of
from pipeline.media.image_decoding import decode_table
from pipeline.run.execution import run_graph
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset
from pipeline.run.job_plan import MAX_BATCH_ROWS
from pipeline.run.plan import Plan, checked
from pipeline.storage.output_dir import OutputDir

TIME_LIMIT_S = 1800
HEAD = ("gcs_server", "raylet")
"""Processes of Ray's head node."""
SMALL_BATCH_ROWS = 32
"""The default before batches were chosen by the size of the job."""
LARGE_BATCH_ROWS = MAX_BATCH_ROWS
UNPACED = 100_000.0
NUM_ROWS = {SMALL_BATCH_ROWS: (10_000, 50_000), LARGE_BATCH_ROWS: (40_000, 240_000)}
"""Rows of a small and a large job, by `batch_rows`; the difference of their times excludes start and end."""
FLEETS = (1, 16, 64)
FLEET_ROWS_PER_S, FLEET_SECONDS, FLEET_BATCH_ROWS = 20.0, 120, 256


@dataclass(frozen=True)
class Case:
    """One job: `num_actors` engines of `rows_per_s` each over `num_rows` rows; `batch_rows` None is the default."""

    num_actors: int
    num_rows: int
    rows_per_s: float
    batch_rows: int | None = None


def run_case(case: Case) -> Results:
    """Run one job in a private Ray; return its seconds, CPU seconds by process, and waits of the engines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "in", case.num_rows)
        plan = _plan(case, folder)
        build = partial(_build, load=PacedPair(case.rows_per_s))
        with session(JobSectionConfig(num_cpus=2)):
            before, start_s = _cpu_seconds(), time.monotonic()
            result = run_graph(plan, build)
            cpu = {process: now - before[process] for process, now in _cpu_seconds().items()}
            total_s = time.monotonic() - start_s
        num_files = len(plan.output.list_files("data"))
    return {
        "wall_s": result.wall_s,
        "total_s": total_s,
        "cpu_s": cpu,
        "engine_wait_share": result.waits.actors_waited,
        "batch_rows": plan.config.pool.batch_rows,
        "num_files": num_files,
    }


def write_rows(folder: Path, num_rows: int) -> None:
    """Write `num_rows` text rows, 100,000 to a file."""
    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, num_rows, 100_000)):
        rows = range(first, min(num_rows, first + 100_000))
        (folder / f"{number:04}.txt").write_text("".join(f"row {row}\n" for row in rows))


def paced_job(source: Path, output: Path, num_actors: int, batch_rows: int | None) -> CaptionJobConfig:
    """Return the job; `batch_rows` None is the default of `pool.batch_rows`."""
    pool: dict[str, Any] = {"min_size": num_actors, "max_size": num_actors, "slots": 16}
    return CaptionJobConfig.model_validate(
        {
            "source": {"kind": "text", "path": str(source)},
            "prompt": "{text}",
            "model": {"target": {"path": "paced"}},
            "pool": pool if batch_rows is None else pool | {"batch_rows": batch_rows},
            "sink": {"path": str(output)},
            "job": {"progress": False},
        }
    )


def _plan(case: Case, folder: Path) -> Plan:
    config = paced_job(folder / "in", folder / "out", case.num_actors, case.batch_rows)
    front_end = SimpleNamespace(special_tokens=(), takes_videos=False, useful_side_px=None)
    pair: Any = SimpleNamespace(target_id="paced", drafter_id="", revisions={}, front_end=front_end)
    output = OutputDir(str(folder / "out"))
    needs = needs_of(config.source, Plan(config, pair, None, output).prompt_options, ())  # type: ignore[arg-type]
    return checked(Plan(config, pair, freeze_for(needs), output), np.zeros(0, np.int64), IN_PROCESS, probe_output=False)


def _build(plan: Plan, run: RunContext, load: PacedPair) -> ray.data.Dataset:
    decode = partial(decode_table, options=plan.decode_options, present=plan.present_ids)
    source: Any = plan.datasource
    stages = CaptionStages(decode, plan.schema, load, plan.weigher)
    return caption_dataset(plan.config, source, source.num_spans, stages, run)


def _cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of this process and of Ray's head processes below it."""
    ticks = os.sysconf("SC_CLK_TCK")
    cpu_s = {"driver": time.process_time(), **dict.fromkeys(HEAD, 0.0)}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if name in HEAD and _descends(int(path.parent.name)):
            cpu_s[name] += (int(fields[11]) + int(fields[12])) / ticks
    return cpu_s


def _descends(pid: int) -> bool:
    """Return whether a process is a descendant of this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def in_new_process(case: Case) -> Results:
    """Run a case in a new Python process, so that one job's threads and caches do not count for the next."""
    command = [sys.executable, "-m", "benchmarks.scale.driver", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIME_LIMIT_S)
    result: Results = json.loads(done.stdout.splitlines()[-1])
    progress(case, result)
    return result


def measure_costs() -> Results:
    """Return CPU microseconds of each process per row with small and large batches, and how they arise.

    Ray's scheduling loop costs CPU time for every second that a job runs and for every batch (`fit`). The difference of
    two jobs of each batch size excludes start and end."""
    cells = [measure_cell(batch_rows, in_new_process) for batch_rows in NUM_ROWS]
    return {"cells": cells, **fit(cells)}


def measure_cell(batch_rows: int, run: Callable[[Case], Results]) -> Results:
    """Return the CPU microseconds of each process per row, from the difference of two jobs that `run` runs."""
    sizes = NUM_ROWS[batch_rows]
    small, large = (run(Case(2, num_rows, UNPACED, batch_rows)) for num_rows in sizes)
    num_rows = sizes[1] - sizes[0]
    cpu_s = {name: large["cpu_s"][name] - small["cpu_s"][name] for name in large["cpu_s"]}
    return {
        "batch_rows": batch_rows,
        "num_rows": num_rows,
        "wall_s": large["wall_s"] - small["wall_s"],
        "cpu_s": cpu_s,
        "cpu_us_per_row": {name: 1e6 * seconds / num_rows for name, seconds in cpu_s.items()},
    }


def fit(cells: list[Results]) -> Results:
    """Solve CPU = `cpu_s_per_s` · seconds + `cpu_ms_per_batch` · batches for each process, from two cells."""
    work = np.array([[cell["wall_s"], cell["num_rows"] / cell["batch_rows"]] for cell in cells])
    fits = {name: np.linalg.solve(work, [cell["cpu_s"][name] for cell in cells]) for name in ("driver", *HEAD)}
    return {
        "cpu_s_per_s": {name: float(solution[0]) for name, solution in fits.items()},
        "cpu_ms_per_batch": {name: 1000 * float(solution[1]) for name, solution in fits.items()},
    }


def measure_fleets() -> list[Results]:
    """Run fleets of paced engines, with the batches of a job of several hours."""
    fleets = []
    for num_actors in FLEETS:
        num_rows = int(num_actors * FLEET_ROWS_PER_S * FLEET_SECONDS)
        result = in_new_process(Case(num_actors, num_rows, FLEET_ROWS_PER_S, FLEET_BATCH_ROWS))
        fleets.append({"num_actors": num_actors, "num_rows": num_rows, "rows_per_s_each": FLEET_ROWS_PER_S, **result})
    return fleets


if __name__ == "__main__":
    print(json.dumps(run_case(Case(**json.loads(sys.argv[1])))))
