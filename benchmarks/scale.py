"""Measures parts of a job that all actors share: the writer and the crash ledger.

    python -m benchmarks.scale                 # writes results/scale.json; one minute on two cores
    python -m benchmarks.scale --add-before    # from another checkout of this project: stores its figures as `before`

The writer publishes blocks from the object store to a local folder, with one, two and four tasks at a time. The ledger
answers clients in tasks.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from benchmarks.harness.markdown import Results, table
from benchmarks.harness.results import command_line, machine, progress, read_results, results_file, write_results
from configs.schema import Job, Sink
from pipeline.cluster.ray_session import session
from pipeline.output.files import Format
from pipeline.output.publishing import Publisher
from pipeline.output.writer import Writer, calls_in_ray
from pipeline.rows.schemas import result_schema
from pipeline.run import crash_ledger
from pipeline.storage.output_dir import OutputDir
from pipeline.synthesis import rows as image_rows

RESULTS = results_file("scale")
NUM_TASKS = (1, 2, 4)
CAPTION_BYTES, IMAGE_BYTES = 600, 60_000
BLOCKS = {"captions": (64, 4096), "images": (160, 64)}
"""Number of blocks, and rows of a block."""
ROWS_PER_FILE = {"captions": 10_000, "images": 1_000}
NUM_LEDGER_BATCHES, NUM_LEDGER_CLIENTS, LEDGER_ROWS = 200, 4, 32


def rows_of(kind: str, number: int) -> pa.Table:
    """Make the block with this number: result rows with random captions or random image bytes."""
    _, count = BLOCKS[kind]
    random = np.random.default_rng(number)
    schema = result_schema() if kind == "captions" else image_rows.result_schema([], True, False)
    ids = [f"rows.txt#{number * count + row}" for row in range(count)]
    texts = random.bytes(CAPTION_BYTES // 2 * count).hex()
    given: dict[str, list[Any]] = {
        "sample_id": ids,
        "row_index": list(range(number * count, (number + 1) * count)),
        "generated_text": [texts[CAPTION_BYTES * row : CAPTION_BYTES * (row + 1)] for row in range(count)],
        "image": [{"bytes": random.bytes(IMAGE_BYTES), "path": None} for _ in range(count)] if kind == "images" else [],
        "error_type": [""] * count,
    }
    empty = {pa.string(): "", pa.binary(): b""}
    columns = [
        pa.array(given[field.name], field.type)
        if field.name in given
        else pa.nulls(count, field.type)
        if not (pa.types.is_string(field.type) or pa.types.is_integer(field.type))
        else pa.array([empty.get(field.type, 0)] * count, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def measure_writer(kind: str, num_tasks: int, folder: Path) -> Results:
    """Publish all blocks; return rows and megabytes per second, and CPU seconds of the driver per 1,000 rows."""
    count, rows = BLOCKS[kind]
    make = ray.remote(num_cpus=1)(rows_of)
    blocks = [make.remote(kind, number) for number in range(count)]
    ray.wait(blocks, num_returns=count)
    num_bytes = rows_of(kind, 0).nbytes
    sink = Sink(path=str(folder), rows_per_file=ROWS_PER_FILE[kind])
    output = OutputDir(str(folder))
    output.take_attempt({})
    publisher = Publisher(output, Format(rows_of(kind, 0).schema), 1, "scale", sink.rows_per_file)
    options = {"max_tasks": num_tasks} if "max_tasks" in inspect.signature(Writer).parameters else {}
    start_s, cpu_s = time.perf_counter(), time.process_time()
    with Writer(publisher, sink, (), {"data": 0, "errors": 0}, calls_in_ray(), **options) as writer:
        for block in blocks:
            writer.add([block], rows, num_bytes)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return {
        "kind": kind,
        "num_tasks": num_tasks if options else 1,
        "rows_per_s": count * rows / wall_s,
        "mb_per_s": count * num_bytes / 1e6 / wall_s,
        "driver_cpu_ms_per_1000_rows": 1e6 * cpu_s / (count * rows),
        "num_files": len(output.list_files("data")),
    }


def _use_ledger(log: crash_ledger.CrashLedger, client: int) -> None:
    keys = [f"{client} {row}" for row in range(LEDGER_ROWS)]
    for number in range(NUM_LEDGER_BATCHES):
        log.begin(f"{client}-{number}", keys)
        log.end(f"{client}-{number}", keys, LEDGER_ROWS, {})


def measure_ledger() -> Results:
    """Return batches per second of the crash ledger with several clients."""
    with crash_ledger.kept() as log:
        log.begin("warm", [])
        use = ray.remote(num_cpus=0)(_use_ledger)
        ray.get([use.remote(log, -1 - client) for client in range(NUM_LEDGER_CLIENTS)])
        start_s = time.perf_counter()
        ray.get([use.remote(log, client) for client in range(NUM_LEDGER_CLIENTS)])
        wall_s = time.perf_counter() - start_s
    num_batches = NUM_LEDGER_BATCHES * NUM_LEDGER_CLIENTS
    return {"num_clients": NUM_LEDGER_CLIENTS, "rows": LEDGER_ROWS, "batches_per_s": num_batches / wall_s}


def measure() -> Results:
    found: Results = {"machine": machine(), "writer": []}
    with tempfile.TemporaryDirectory() as name, session(Job(num_cpus=2)):
        for kind in BLOCKS:
            for num_tasks in NUM_TASKS:
                found["writer"].append(measure_writer(kind, num_tasks, Path(name, f"{kind}-{num_tasks}")))
                progress(found["writer"][-1])
        found["ledger"] = measure_ledger()
        progress(found["ledger"])
    return found


def writer_table(results: Results) -> str:
    """Render the writer's rates, with those of the former writer, which had one chain of tasks."""
    before = {row["kind"]: row for row in results.get("before", {}).get("writer", [])}
    rows = [
        (kind, "before", *_rates(row)) for kind, row in before.items()
    ] + [(row["kind"], row["num_tasks"], *_rates(row)) for row in results["writer"]]  # fmt: skip
    return table("rows | tasks | rows/s | MB/s | driver CPU, ms per 1,000 rows", rows)


def _rates(row: Results) -> tuple[str, ...]:
    return f"{row['rows_per_s']:,.0f}", f"{row['mb_per_s']:,.0f}", f"{row['driver_cpu_ms_per_1000_rows']:.1f}"


def ledger_table(results: Results) -> str:
    ledger = results["ledger"]
    rate = ledger["batches_per_s"]
    return table(
        "rows of a batch | batches/s | rows/s", [(ledger["rows"], f"{rate:,.0f}", f"{rate * ledger['rows']:,.0f}")]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("scale", __doc__)
    parser.add_argument("--add-before", type=Path, metavar="JSON", help="store these figures as `before`, and stop")
    options = parser.parse_args(arguments)
    if options.add_before:
        write_results(RESULTS, read_results(RESULTS) | {"before": read_results(options.add_before)})
        return 0
    found = measure()
    if RESULTS.exists() and "before" in (earlier := read_results(RESULTS)):
        found["before"] = earlier["before"]
    write_results(RESULTS, found)
    print(writer_table(found), ledger_table(found), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
