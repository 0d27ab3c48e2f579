"""Measures planning and resuming of large jobs: time and memory of the driver, one new process per case.

`python -m benchmarks.scale.planner CASE FOLDER` measures one case, and prints its figures as JSON.

Listed images are synthetic, so the time of listing a store is not included. Local files are in the page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness.markdown import Results
from configs.pool import JobSectionConfig
from configs.source import SourceConfig
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.manifest import freezing
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.done_bitmap import DoneBitmap
from pipeline.manifest.freezing import freeze_for, needs_of
from pipeline.manifest.manifest import Manifest
from pipeline.output.files import Format
from pipeline.output.inventory import take_inventory
from pipeline.output.publishing import Publisher
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import result_schema
from pipeline.storage.listing import Listed
from pipeline.storage.output_dir import DATA, OutputDir


@dataclass(frozen=True)
class Case:
    """One measured case: `prepare(folder, case)` writes its files, `run(folder, case)` returns further figures."""

    name: str
    num_files: int
    rows_per_file: int
    prepare: Callable[[Path, Case], None]
    run: Callable[[Path, Case], Results]

    @property
    def num_rows(self) -> int:
        return self.num_files * self.rows_per_file


class Unreadable:
    """A file system without files."""

    def unstrip_protocol(self, path: str) -> str:
        return f"s3://{path}"


def no_files(folder: Path, case: Case) -> None:
    """Write nothing."""


def write_parquet(folder: Path, case: Case, num_distinct: int | None = None) -> None:
    """Write Parquet files with distinct ids; after `num_distinct` files, the others are hard links to these."""
    num_distinct = num_distinct or case.num_files
    (folder / "in").mkdir()
    for number in range(case.num_files):
        path = folder / f"in/{number:06d}.parquet"
        if number >= num_distinct:
            os.link(folder / f"in/{number % num_distinct:06d}.parquet", path)
            continue
        first = number * case.rows_per_file
        ids = pa.array(np.arange(first, first + case.rows_per_file)).cast(pa.string())
        ids = pc.binary_join_element_wise("image-", ids, "")
        pq.write_table(pa.table({"id": ids, "text": ["a text"] * len(ids)}), path, compression="zstd")


def write_links(folder: Path, case: Case) -> None:
    write_parquet(folder, case, min(100, case.num_files))


def write_jsonl(folder: Path, case: Case) -> None:
    (folder / "in").mkdir()
    for number in range(case.num_files):
        with (folder / f"in/{number}.jsonl").open("w") as file:
            for row in range(case.rows_per_file):
                file.write(f'{{"id": "{number}-{row}", "text": "{"words of a caption " * 4}"}}\n')


def write_output(folder: Path, case: Case) -> None:
    """Write an output of one attempt whose files have all rows but those of the last file."""
    (folder / "in").mkdir()
    (folder / "in/rows.txt").write_text("row\n" * case.num_rows)
    output = OutputDir(str(folder / "out"))
    output.take_attempt({"config_fingerprint": "f"})
    schema = result_schema()
    publisher = Publisher(output, Format(schema), 1, "f", case.rows_per_file)
    for number in range(case.num_files):
        rows = range(number * case.rows_per_file, (number + 1) * case.rows_per_file)
        given: dict[str, Any] = {
            "sample_id": [f"rows.txt#{row}" for row in rows],
            "source": ["rows.txt"] * len(rows),
            "row_index": list(rows),
            "attempt": [1] * len(rows),
        }
        columns = [
            given[field.name]
            if field.name in given
            else [""] * len(rows)
            if pa.types.is_string(field.type)
            else pa.nulls(len(rows), field.type)
            for field in schema
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        publisher.publish_rows(DATA, number, pa.table(arrays, schema=schema))


def plan_listing(folder: Path, case: Case) -> Results:
    """Plan listed images up to Ray's read tasks, and plan them again with half of the samples done."""
    source = SourceConfig(kind="images", path="s3://bucket/train")

    def listing() -> Iterator[Listed]:
        for number in range(case.num_files):
            yield Listed(f"train/{number // 1000:05d}/{number:09d}.jpg", 90_000 + number % 1000, f"{number:032x}")

    files = freezing._table(listing())
    needs = needs_of(source, PromptOptions(), ())
    frozen = freezing.survey_files(Unreadable(), "bucket/train", files, needs, IN_PROCESS)
    result = _read_tasks(source, frozen) | {"planning_rss_bytes": peak_bytes()}
    done = DoneBitmap(frozen.counts)
    every_other = np.arange(0, case.num_files, 2)
    done.add(every_other, np.zeros(len(every_other), np.int64))
    assert SpanDatasource(source, frozen, done=done).num_samples == case.num_files // 2
    return result


def plan_parquet(folder: Path, case: Case) -> Results:
    """Plan Parquet files without an id column."""
    return _plan(SourceConfig(kind="parquet", path=str(folder / "in")), case)


def plan_ids(folder: Path, case: Case) -> Results:
    """Plan Parquet files and compare their ids."""
    return _plan(SourceConfig(kind="parquet", path=str(folder / "in"), id_column="id"), case)


def plan_jsonl(folder: Path, case: Case) -> Results:
    """Plan files of lines."""
    num_bytes = sum(path.stat().st_size for path in (folder / "in").iterdir())
    return _plan(SourceConfig(kind="jsonl", path=str(folder / "in")), case) | {"source_bytes": num_bytes}


def _plan(source: SourceConfig, case: Case) -> Results:
    with Workers(JobSectionConfig(num_cpus=2)) as workers:
        frozen = freeze_for(needs_of(source, PromptOptions(), ()), workers)
    assert frozen.num_samples == case.num_rows
    return _read_tasks(source, frozen)


def _read_tasks(source: SourceConfig, frozen: Manifest) -> Results:
    tasks = SpanDatasource(source, frozen).get_read_tasks(1)
    return {"num_read_tasks": len(tasks), "manifest_bytes": frozen.files.nbytes}


def resume_output(folder: Path, case: Case) -> Results:
    """Take the inventory of an output, and again with one more file, which the first inventory does not know."""
    source = SourceConfig(kind="text", path=str(folder / "in"))
    frozen = freeze_for(needs_of(source, PromptOptions(), ()))
    output = OutputDir(str(folder / "out"))
    last = folder / f"out/data/part-{case.num_files - 1:06d}.parquet"
    last.rename(folder / "last.parquet")
    began_s = time.perf_counter()
    with Workers(JobSectionConfig(num_cpus=2)) as workers:
        known = take_inventory(output, frozen, 1, {1: "f"}, workers=workers)
        first_s = time.perf_counter() - began_s
        (folder / "last.parquet").rename(last)
        again = take_inventory(output, frozen, 1, {1: "f"}, known=known, workers=workers)
    second_s = time.perf_counter() - began_s - first_s
    assert (again.num_rows[DATA], again.num_files_read) == (case.num_rows, num_files_read_again(case))
    return {"inventory_s": first_s, "incremental_inventory_s": second_s, "num_files_read_again": again.num_files_read}


def num_files_read_again(case: Case) -> int:
    """Return how many files an inventory with one new file reads."""
    return 1


CASES = (
    Case("listed images", 1_000_000, 1, no_files, plan_listing),
    Case("listed images", 10_000_000, 1, no_files, plan_listing),
    Case("Parquet, no ids", 100_000, 1000, write_links, plan_parquet),
    Case("Parquet, ids compared", 10_000, 1000, write_parquet, plan_ids),
    Case("JSONL, 1 GB", 4, 2_400_000, write_jsonl, plan_jsonl),
    Case("output, inventory", 100, 10_000, write_output, resume_output),
)
GOAL = Case("Parquet, ids compared", 100_000, 1000, write_parquet, plan_ids)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes, without that of the process it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run_case(case: Case, folder: Path) -> Results:
    """Measure a case whose files are in `folder`: wall and CPU seconds and peak memory (bytes) of this process."""
    before_bytes, start_s, cpu_s = peak_bytes(), time.perf_counter(), time.process_time()
    result = case.run(folder, case)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    peak = peak_bytes()
    return {
        "case": case.name,
        "num_files": case.num_files,
        "num_rows": case.num_rows,
        "wall_s": wall_s,
        "driver_cpu_s": cpu_s,
        "peak_rss_bytes": peak,
        "rss_bytes_per_row": (peak - before_bytes) / case.num_rows,
        **result,
    }


def measure_planner(cases: tuple[Case, ...] = CASES) -> Results:
    """Measure every case in a new process, and return the figures as `cases`."""
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            case.prepare(Path(folder), case)
            number = (*CASES, GOAL).index(case)
            command = [sys.executable, "-m", "benchmarks.scale.planner", str(number), folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1], file=sys.stderr, flush=True)
    return {"cases": results}


if __name__ == "__main__":
    number, folder = sys.argv[1:]
    print(json.dumps(run_case((*CASES, GOAL)[int(number)], Path(folder))), flush=True)
