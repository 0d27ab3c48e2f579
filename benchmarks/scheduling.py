"""Measures the graph's overhead: the share of time that one, two, four or eight actors spend on rows.

    python -m benchmarks.scheduling    # writes results/scheduling.json

The real graph on real files, with engines that sleep 20 ms per row. The measured window
begins when the last actor starts its first row and ends when the first actor ends its last row. Losses are sleeps that
take too long (the machine wakes the process late) and times between rows (the graph or the engine's thread is late).
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.decode import timed_dataset, timed_job
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.paced import PacedEngine, PacedPair
from benchmarks.harness.results import command_line, finish, machine, results_file
from configs.pool import Job
from decoding.types import Completion
from pipeline.cluster.ray_session import session

RESULTS = results_file("scheduling")
NUM_ACTORS = (1, 2, 4, 8)
ROW_S = 0.02
BATCH_ROWS = 32
ROWS_PER_ACTOR = 400
GOAL = 0.95
TIMES = "dd"
"""Start and end of a row, in seconds of the machine's monotonic clock."""
Step = tuple[float, float]


class RecordedEngine(PacedEngine):
    """An engine that writes the start and end of each row to its own file."""

    def __init__(self, row_s: float, folder: Path) -> None:
        super().__init__(1, 1.0 / row_s)
        self._file = (folder / uuid.uuid4().hex).open("wb", buffering=0)

    def step(self) -> list[Completion]:
        start_s = time.monotonic()
        done = super().step()
        self._file.write(struct.pack(TIMES, start_s, time.monotonic()))
        return done


class RecordedPair(PacedPair):
    def __init__(self, row_s: float, folder: Path) -> None:
        super().__init__(1.0 / row_s)
        self._row_s, self._folder = row_s, folder

    def engine(self, slots: int) -> RecordedEngine:
        return RecordedEngine(self._row_s, self._folder)


def run_graph(folder: Path, num_actors: int, num_rows: int) -> list[list[Step]]:
    """Run the graph over text rows; return the start and end of each row, one list per actor."""
    source_folder, records = folder / f"in_{num_actors}", folder / f"records_{num_actors}"
    source_folder.mkdir()
    records.mkdir()
    (source_folder / "rows.txt").write_text("".join(f"row {row}\n" for row in range(num_rows)))
    source = {"kind": "text", "path": str(source_folder), "span_max_rows": 20 * BATCH_ROWS}
    job = timed_job(source, {"min_size": num_actors, "max_size": num_actors, "batch_rows": BATCH_ROWS}, folder / "out")
    dataset = timed_dataset(job, RecordedPair(ROW_S, records))
    assert sum(len(batch["sample_id"]) for batch in dataset.iter_batches(batch_size=None)) == num_rows
    return [list(struct.iter_unpack(TIMES, path.read_bytes())) for path in sorted(records.iterdir())]


def judge(actors: list[list[Step]], row_s: float) -> dict[str, Any]:
    """Return rates and losses while all actors are busy: `share_of_ideal` is relative to the ideal row rate, the other
    shares to the time."""
    first_s = max(steps[0][0] for steps in actors)
    last_s = min(steps[-1][1] for steps in actors)
    assert first_s < last_s, "some actor had ended before another began"
    # Rows that cross the bounds of the window count with the part inside it.
    rows = sleeping_s = without_row_s = 0.0
    for steps in actors:
        for start_s, end_s in steps:
            inside_s = max(0.0, min(end_s, last_s) - max(start_s, first_s))
            sleeping_s += inside_s
            rows += inside_s / (end_s - start_s)
        for (_, end_s), (start_s, _) in pairwise(steps):
            without_row_s += max(0.0, min(start_s, last_s) - max(end_s, first_s))
    total_s = (last_s - first_s) * len(actors)
    return {
        "window_s": round(last_s - first_s, 2),
        "rows_per_s": round(rows / (last_s - first_s), 2),
        "share_of_ideal": round(rows * row_s / total_s, 4),
        "late_share": round((sleeping_s - rows * row_s) / total_s, 4),
        "without_row_share": round(without_row_s / total_s, 4),
        "mean_sleep_ms": round(1000 * sleeping_s / rows, 3),
    }


def measure() -> dict[str, Any]:
    """Run the graph with every number of actors under one Ray; return rates and losses."""
    cells = {}
    description = machine()
    with tempfile.TemporaryDirectory() as name, session(Job(num_cpus=2)):
        for num_actors in NUM_ACTORS:
            actors = run_graph(Path(name), num_actors, ROWS_PER_ACTOR * num_actors)
            assert len(actors) == num_actors, f"{len(actors)} of {num_actors} actors got rows"
            cells[str(num_actors)] = {"num_rows": ROWS_PER_ACTOR * num_actors, **judge(actors, ROW_S)}
            print(json.dumps({num_actors: cells[str(num_actors)]}), flush=True)
    return {
        "row_ms": 1000 * ROW_S,
        "batch_rows": BATCH_ROWS,
        "goal": GOAL,
        "machine": description,
        "cells": cells,
    }


def scheduling_table(results: Results) -> str:
    names = ("share_of_ideal", "late_share", "without_row_share")
    rows = [
        (num_actors, f"{cell['rows_per_s']:.1f}", *(percent(cell[name], 1) for name in names))
        for num_actors, cell in results["cells"].items()
    ]
    return table("actors | rows per second | share of ideal | sleeps that took too long | without a row", rows)


def autoscaling_table(results: Results) -> str:
    """Render the nodes and actors of a job over time, measured by tests/cluster/test_autoscaling.py."""
    line, done_s = results["time_line"], results["job_done_at_s"]
    end = next((moment for moment in line if moment["at_s"] >= done_s), None)
    rows = [
        (f"{moment['at_s']:.1f}", moment["num_nodes"], moment["num_actors"], "the job has ended" * (moment is end))
        for moment in line
    ]
    return table("seconds | worker nodes | actors | ", rows)


def main(arguments: list[str] | None = None) -> int:
    command_line("scheduling", __doc__).parse_args(arguments)
    return finish(RESULTS, measure(), scheduling_table)


if __name__ == "__main__":
    sys.exit(main())
