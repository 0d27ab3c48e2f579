"""How much of their time actors spend on rows when there are one, two, four or eight of them: the graph's overhead.

    python -m benchmarks.scheduling            # printed, and written to results/scheduling.json
    python -m benchmarks.scheduling --quick    # a tenth of the rows, printed only

The real graph on real files, with engines that sleep 20 ms for each row, so that a CPU is not what limits them. Counted
are the rows that end between the moment at which the last actor begins its first row and the one at which the first
actor ends its last row, against as many as so many actors can end meanwhile. What is missing is either a sleep that
took longer than it was told (the machine was late to wake the process) or a time without a row between two (the graph,
the engine's thread and the batches between them were late).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import sys
import tempfile
import time
import uuid
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.results import Stamp
from benchmarks.decode import TimedEngine, TimedPair
from benchmarks.fleet_tables import scheduling_table
from configs.schema import CaptionJob, Job
from decoding.types import Completion
from pipeline.cluster.ray_session import available_cpus, session
from pipeline.media.image_decoding import DecodeOptions, decode_table
from pipeline.prompts.row_options import Asking
from pipeline.rows.schemas import result_schema
from pipeline.run.graph import caption_dataset
from pipeline.source.datasource import SpanDatasource
from pipeline.source.manifest import freeze

RESULTS = Path(__file__).parent / "results" / "scheduling.json"
NUM_ACTORS = (1, 2, 4, 8)
ROW_S = 0.02
BATCH_ROWS = 32
ROWS_PER_ACTOR = 400
GOAL = 0.95
TIMES = "dd"
"""When a row began and ended, in seconds of the machine's one monotonic clock."""

Step = tuple[float, float]


class NotedEngine(TimedEngine):
    """Leaves in a file of its own when each row began and ended."""

    def __init__(self, row_s: float, folder: Path) -> None:
        super().__init__(row_s)
        self._notes = (folder / uuid.uuid4().hex).open("wb", buffering=0)

    def step(self) -> list[Completion]:
        began_s = time.monotonic()
        done = super().step()
        self._notes.write(struct.pack(TIMES, began_s, time.monotonic()))
        return done


class NotedPair(TimedPair):
    """Gives such engines."""

    def __init__(self, row_s: float, folder: Path) -> None:
        super().__init__(row_s)
        self._folder = folder

    def engine(self, slots: int, max_context_tokens: int) -> NotedEngine:
        return NotedEngine(self._row_s, self._folder)


class LoadNoted:
    """Loads a `NotedPair`."""

    def __init__(self, row_s: float, folder: Path) -> None:
        self._row_s, self._folder = row_s, folder

    def __call__(self, config: CaptionJob, num_threads: int | None) -> NotedPair:
        return NotedPair(self._row_s, self._folder)


def run_graph(folder: Path, num_actors: int, num_rows: int) -> list[list[Step]]:
    """Run the graph over rows of text; when each row of each actor began and ended."""
    source_folder, notes = folder / f"in_{num_actors}", folder / f"notes_{num_actors}"
    source_folder.mkdir()
    notes.mkdir()
    (source_folder / "rows.txt").write_text("".join(f"row {row}\n" for row in range(num_rows)))
    job = CaptionJob.model_validate(
        {
            "source": {"kind": "text", "path": str(source_folder), "span_max_rows": 20 * BATCH_ROWS},
            "prompt": "What?",
            "model": {"target": {"path": "timed"}},
            "pool": {"min_size": num_actors, "max_size": num_actors, "slots": 1, "batch_rows": BATCH_ROWS},
            "sink": {"path": str(folder / "out")},
            "job": {"progress": False},
        }
    )
    asking = Asking.of(job)
    frozen = freeze(job.source, asking)
    source = SpanDatasource(job.source, frozen, ())
    decode = partial(decode_table, options=DecodeOptions.of(job.source, frozen.root, asking))
    stamp, load = Stamp("scheduling", 1, "0"), LoadNoted(ROW_S, notes)
    dataset = caption_dataset(job, source, source.num_spans, decode, result_schema(), stamp, load=load)
    assert sum(len(batch["sample_id"]) for batch in dataset.iter_batches(batch_size=None)) == num_rows
    return [list(struct.iter_unpack(TIMES, path.read_bytes())) for path in sorted(notes.iterdir())]


def judge(actors: list[list[Step]], row_s: float) -> dict[str, Any]:
    """What the actors did between all being at work and the first having nothing more to do; see the module.

    `share_of_ideal` is of the rows that they could have ended, `late_share` and `without_row_share` of their time.
    """
    first_s = max(steps[0][0] for steps in actors)
    last_s = min(steps[-1][1] for steps in actors)
    assert first_s < last_s, "some actor had ended before another began"
    # Those that the window cuts count with the part that lies in it, so that its ends favour nobody.
    rows = sleeping_s = without_row_s = 0.0
    for steps in actors:
        for began_s, ended_s in steps:
            inside_s = max(0.0, min(ended_s, last_s) - max(began_s, first_s))
            sleeping_s += inside_s
            rows += inside_s / (ended_s - began_s)
        for (_, ended_s), (began_s, _) in pairwise(steps):
            without_row_s += max(0.0, min(began_s, last_s) - max(ended_s, first_s))
    total_s = (last_s - first_s) * len(actors)
    return {
        "window_s": round(last_s - first_s, 2),
        "rows_per_s": round(rows / (last_s - first_s), 2),
        "share_of_ideal": round(rows * row_s / total_s, 4),
        "late_share": round((sleeping_s - rows * row_s) / total_s, 4),
        "without_row_share": round(without_row_s / total_s, 4),
        "mean_sleep_ms": round(1000 * sleeping_s / rows, 3),
    }


def measure(rows_per_actor: int) -> dict[str, Any]:
    """All numbers of actors, one after the other under one Ray."""
    cells = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, session(Job(num_cpus=2)):
        for num_actors in NUM_ACTORS:
            actors = run_graph(Path(name), num_actors, rows_per_actor * num_actors)
            assert len(actors) == num_actors, f"{len(actors)} of {num_actors} actors got rows"
            cells[str(num_actors)] = {"num_rows": rows_per_actor * num_actors, **judge(actors, ROW_S)}
            print(json.dumps({num_actors: cells[str(num_actors)]}), flush=True)
    return {
        "row_ms": 1000 * ROW_S,
        "batch_rows": BATCH_ROWS,
        "goal": GOAL,
        "machine": f"{platform.machine()}, {available_cpus()} cores, load {load:.1f} at the start",
        "cells": cells,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, and nothing is written")
    options = parser.parse_args(arguments)
    found = measure(ROWS_PER_ACTOR // 10 if options.quick else ROWS_PER_ACTOR)
    print(scheduling_table(found))
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
