"""Measures CPU time and memory of planning ten million files on the driver, up to Ray's read tasks.

    python -m benchmarks.planning    # writes results/planning.json

Runs in one new process on a synthetic listing; the time of listing a store is not included.
"""

from __future__ import annotations

import json
import pickle
import platform
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness.results import results_file, write_results
from configs.source import Source
from pipeline.prompts.row_options import PromptOptions
from pipeline.source import manifest
from pipeline.source.datasource import SpanDatasource
from pipeline.source.done_bitmap import DoneBitmap
from pipeline.sources import kind_of
from pipeline.storage.listing import Listed

RESULTS = results_file("planning")
NUM_FILES = 10_000_000
MAX_SECONDS, MAX_BYTES = 60.0, 2 * 1024**3


class Unreadable:
    """A file system without files."""

    def unstrip_protocol(self, path: str) -> str:
        return f"s3://{path}"


def listing() -> Iterator[Listed]:
    """Yield files in the order of a directory walk, a thousand to a folder."""
    for number in range(NUM_FILES):
        yield Listed(f"train/{number // 1000:05d}/{number:09d}.jpg", 90_000 + number % 1000, f"{number:032x}")


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure() -> dict[str, Any]:
    """Return the CPU seconds of each planning step, and the peak memory."""
    source = Source(kind="images", path="s3://bucket/train")
    seconds: dict[str, float] = {}
    start_s = time.process_time()

    def lap(name: str) -> None:
        nonlocal start_s
        now_s = time.process_time()
        seconds[name], start_s = round(now_s - start_s, 2), now_s

    files = manifest._table(listing())
    lap("listing as Arrow, sorted")
    frozen = manifest.survey_files(Unreadable(), "bucket/train", files, manifest.needs_of(source, PromptOptions(), ()))
    lap("survey")
    datasource = SpanDatasource(source, frozen)
    lap("spans")
    tasks = datasource.get_read_tasks(1)
    lap("read tasks")
    total = sum(seconds.values())
    num_bytes = sum(len(pickle.dumps(task.read_fn.args)) for task in tasks[:100]) * len(tasks) // 100
    lap("one in a hundred of them serialised")
    planning_bytes = max_resident_bytes()
    done = DoneBitmap(frozen.counts)
    every_other = np.arange(0, NUM_FILES, 2)
    done.add(every_other, np.zeros(len(every_other), np.int64))
    assert SpanDatasource(source, frozen, done=done).num_samples == NUM_FILES // 2
    lap("spans of a resumed job, half of it done")
    return {
        "num_files": NUM_FILES,
        "num_read_tasks": len(tasks),
        "cpu_seconds": seconds,
        "planning_cpu_s": round(total, 2),
        "max_resident_bytes": planning_bytes,
        "max_resident_bytes_resumed": max_resident_bytes(),
        "read_tasks_bytes": num_bytes,
        "holds": total <= MAX_SECONDS and planning_bytes <= MAX_BYTES,
        "machine": f"{platform.machine()}, {platform.python_version()}, other work beside it",
    }


def main() -> int:
    assert kind_of("images").name == "images"  # imports the readers, which is not timed
    found = measure()
    print(json.dumps(found, indent=1))
    write_results(RESULTS, found)
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
