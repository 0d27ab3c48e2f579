"""Measures the writer, which publishes blocks in tasks, and the crash ledger, an actor that all batches report to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from benchmarks.harness.markdown import Results
from configs.schema import SinkConfig
from pipeline.output.files import Format
from pipeline.output.publishing import Publisher
from pipeline.output.writer import Writer, calls_in_ray
from pipeline.rows.schemas import IMAGE_ROWS_PER_GROUP, result_schema
from pipeline.run import crash_ledger
from pipeline.storage.output_dir import OutputDir
from pipeline.synthesis import rows as image_rows

NUM_TASKS = (1, 2, 4)
CAPTION_BYTES, IMAGE_BYTES = 600, 60_000
BLOCKS = {"captions": (64, 4096), "images": (160, 64)}
"""Number of blocks, and rows of a block."""
ROWS_PER_FILE = {"captions": 10_000, "images": 1_000}
NUM_LEDGER_BATCHES, NUM_LEDGER_CLIENTS = 200, 4
LEDGER_ROWS = (32, 512)
NUM_FILES_TIMED = 5


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
    """Publish all blocks; return rows and megabytes per second, CPU time per row, and objects per published file."""
    count, rows = BLOCKS[kind]
    make = ray.remote(num_cpus=1)(rows_of)
    blocks = [make.remote(kind, number) for number in range(count)]
    ray.wait(blocks, num_returns=count)
    num_bytes = rows_of(kind, 0).nbytes
    sink = SinkConfig(path=str(folder), rows_per_file=ROWS_PER_FILE[kind])
    for name in (f"{folder.name}-warm", folder.name):  # the first run starts the processes of the tasks
        publisher = _publisher(kind, folder.with_name(name), sink)
        wall_s, cpu_s = _publish(publisher, sink, blocks, rows, num_bytes, num_tasks)
    num_objects = sum(path.is_file() for path in folder.rglob("*"))
    return {
        "kind": kind,
        "num_tasks": num_tasks,
        "rows_per_s": count * rows / wall_s,
        "mb_per_s": count * num_bytes / 1e6 / wall_s,
        "bytes_per_row": num_bytes / rows,
        "task_cpu_us_per_row": _cpu_of_a_task(kind, folder.with_name(f"{folder.name}-task"), sink),
        "driver_cpu_us_per_row": 1e6 * cpu_s / (count * rows),
        "objects_per_file": num_objects / len(publisher.output.list_files("data")),
        "rows_per_file": sink.rows_per_file,
    }


def _publish(
    publisher: Publisher, sink: SinkConfig, blocks: list[Any], rows: int, num_bytes: int, num_tasks: int
) -> tuple[float, float]:
    """Publish blocks of `rows` rows and `num_bytes` bytes; return the wall time and the CPU time of the driver in s."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    with Writer(publisher, sink, (), {"data": 0, "errors": 0}, calls_in_ray(), max_tasks=num_tasks) as writer:
        for block in blocks:
            writer.add([block], rows, num_bytes)
    return time.perf_counter() - start_s, time.process_time() - cpu_s


def _publisher(kind: str, folder: Path, sink: SinkConfig) -> Publisher:
    output = OutputDir(str(folder))
    output.take_attempt({})
    rows_per_group = IMAGE_ROWS_PER_GROUP if kind == "images" else None
    form = Format(rows_of(kind, 0).schema, rows_per_group=rows_per_group)
    return Publisher(output, form, 1, "scale", sink.rows_per_file)


def _cpu_of_a_task(kind: str, folder: Path, sink: SinkConfig) -> float:
    """Return the least CPU microseconds per row of writing one full file in this process, out of several files."""
    publisher = _publisher(kind, folder, sink)
    tables = [rows_of(kind, number) for number in range(-(-sink.rows_per_file // BLOCKS[kind][1]))]
    spent_s = []
    for number in range(NUM_FILES_TIMED):
        cpu_s = time.process_time()
        publish_file(publisher, number, pa.concat_tables(tables).slice(0, sink.rows_per_file))
        spent_s.append(time.process_time() - cpu_s)
    return 1e6 * min(spent_s) / sink.rows_per_file


def publish_file(publisher: Publisher, number: int, rows: pa.Table) -> None:
    """Write rows as one file, as the task of a full file does."""
    publisher.publish_rows("data", number, rows)


def _use_ledger(log: crash_ledger.CrashLedgerClient, client: int, num_rows: int) -> None:
    keys = [f"images/{client}.jpg\n{row}" for row in range(num_rows)]
    for number in range(NUM_LEDGER_BATCHES):
        log.begin(f"{client}-{number}", keys)
        log.end(f"{client}-{number}", keys, num_rows, {})


def measure_ledger() -> list[Results]:
    """Return batches per second of the crash ledger with several clients, for small and large batches."""
    results = []
    use = ray.remote(num_cpus=0)(_use_ledger)
    for num_rows in LEDGER_ROWS:
        with crash_ledger.open_ledger() as log:
            ray.get([use.remote(log, -1 - client, num_rows) for client in range(NUM_LEDGER_CLIENTS)])
            start_s = time.perf_counter()
            ray.get([use.remote(log, client, num_rows) for client in range(NUM_LEDGER_CLIENTS)])
            wall_s = time.perf_counter() - start_s
        num_batches = NUM_LEDGER_BATCHES * NUM_LEDGER_CLIENTS
        results.append({"num_clients": NUM_LEDGER_CLIENTS, "rows": num_rows, "batches_per_s": num_batches / wall_s})
    return results
