"""Names, writes and reads result files: Parquet files whose footers contain the attempt and the config fingerprint.

data/part-NNNNNN.parquet                 rows with a result          (published, see `pipeline.output.publishing`)
errors/part-NNNNNN.parquet               rows with an `error_type`
_job/spool/aNNNN/NNNNNN-NN-data.parquet  finished rows that are not published yet; `-errors.parquet` for error rows
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.cluster.partitions import IN_PROCESS, Partition, Workers
from pipeline.storage import access
from pipeline.storage.damage import NO_FILE_ERRNOS
from pipeline.storage.output_dir import DATA, ERRORS, JOB, OutputDir, as_json
from pipeline.storage.parquet_files import DamagedParquet, num_rows_of, open_parquet

SPOOL = f"{JOB}/spool"
CHECKSUMS = f"{JOB}/files"
ATTEMPT_KEY, FINGERPRINT_KEY = b"draftfleet.attempt", b"draftfleet.config_fingerprint"
NUM_READ_THREADS = 8
PARTITION_FILES = 32
"""Maximum number of result files of one partition, whose rows are in memory at the same time."""
RESULT_FILE_S = 5e-3
"""Estimated seconds of one core to read some columns of a result file."""
KEYS: dict[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("sample_id", "source", "error_type"), pa.types.is_string),
    **dict.fromkeys(("row_index", "attempt"), pa.types.is_integer),
}
"""Columns that every result file has, without nulls, and the checks of their types."""
_BATCH_ROWS = 1024
_MAX_ATTEMPT_DIGITS = 9
_PUBLISHED = re.compile(r"part-(\d{6,})\.parquet")
_OF_SHARD = re.compile(r"(?:data|errors)/shard-(\d{4})-part-\d{6,}\.parquet")
_SPOOLED = re.compile(r"a(\d{4,})/(\d{6,})-(\d\d+)-(data|errors)\.parquet")


@dataclass(frozen=True)
class Format:
    """File format of a job's tables: schema, columns kept from the source (`kept_columns`), and Parquet options."""

    schema: pa.Schema
    kept_columns: frozenset[str] = frozenset()
    compression: str = "zstd"
    rows_per_group: int | None = None

    def check(self, table: pa.Table) -> pa.Table:
        """Cast a table to the schema; raise ValueError for other columns, or nulls in strings that are not kept."""
        if table.schema.names != self.schema.names:
            raise ValueError(f"a result block has the columns {table.schema.names}, not {self.schema.names}")
        table = table.cast(self.schema)
        for field in self.schema:
            if field.type == pa.string() and field.name not in self.kept_columns and table[field.name].null_count:
                raise ValueError(f"the column {field.name!r} of a result block holds nulls")
        return table

    def serialise(self, table: pa.Table, attempt: int, fingerprint: str) -> pa.Buffer:
        """Encode a table as a Parquet file in memory, and check the number of rows in its footer."""
        stamp = {ATTEMPT_KEY: str(attempt).encode(), FINGERPRINT_KEY: fingerprint.encode()}
        table = table.replace_schema_metadata({**(self.schema.metadata or {}), **stamp})
        sink = pa.BufferOutputStream()
        options = {"compression": self.compression, "row_group_size": self.rows_per_group}
        pq.write_table(table, sink, write_page_checksum=True, **options)
        buffer = sink.getvalue()
        if (num_rows := num_rows_of(buffer)) != table.num_rows:
            raise OSError(f"a Parquet file of {table.num_rows} rows reads back with {num_rows}")
        return buffer


def split(table: pa.Table) -> dict[str, pa.Table]:
    """Split result rows by folder: rows without an `error_type` for `data/`, the others for `errors/`."""
    failed = pc.not_equal(table["error_type"], "")
    return {DATA: table.filter(pc.invert(failed)), ERRORS: table.filter(failed)}


def parts(table: pa.Table, max_rows: int) -> list[pa.Table]:
    """Slice a table into parts of at most `max_rows` rows; an empty table has no parts."""
    return [table.slice(start, max_rows) for start in range(0, table.num_rows, max_rows)]


def published_name(folder: str, number: int) -> str:
    return f"{folder}/part-{number:06d}.parquet"


def published_number(relative: str) -> int | None:
    """Return the number of a published file from its path; None for other names."""
    match = _PUBLISHED.fullmatch(relative.partition("/")[2])
    return int(match[1]) if match else None


def shard_of(relative: str) -> int | None:
    """Return the shard of a published file from its path in the whole output; None for other names."""
    match = _OF_SHARD.fullmatch(relative)
    return int(match[1]) if match else None


def spool_name(attempt: int, number: int, part: int, folder: str) -> str:
    """Return the path of a spool file, which holds finished rows for `data/` or `errors/` until they are published."""
    return f"{SPOOL}/a{attempt:04d}/{number:06d}-{part:02d}-{folder}.parquet"


def spool_attempt(relative: str) -> int:
    """Return the number of the attempt that wrote a spool file, from a path that `list_spooled` returned."""
    match = _SPOOLED.fullmatch(relative.removeprefix(f"{SPOOL}/"))
    assert match is not None, relative
    return int(match[1])


def list_published(output: OutputDir, *folders: str) -> list[str]:
    """List all files of `data/`, `errors/` or both, as paths relative to the output, by folder and number."""
    names = [f"{folder}/{name}" for folder in folders for name in output.list_files(folder)]
    return sorted(names, key=lambda name: (name.partition("/")[0], published_number(name) or 0, name))


def list_spooled(output: OutputDir, folder: str) -> list[str]:
    """List the spool files of all attempts for `data/` or `errors/`, as paths relative to the output."""
    matches = [(name, _SPOOLED.fullmatch(name)) for name in output.list_files(SPOOL)]
    return [f"{SPOOL}/{name}" for name, match in matches if match and match[4] == folder]


@dataclass(frozen=True)
class Found:
    """A result file that was read: some columns, its attempt and config fingerprint; or the `problem` of a bad file."""

    relative: str
    table: pa.Table | None = None
    attempt: int = 0
    fingerprint: str = ""
    problem: str = ""


def read_found(output: OutputDir, relative: str, columns: Sequence[str], all_pages: bool = False) -> Found:
    """Read `columns` of one file; a damaged or foreign file has a `problem`. With `all_pages`, also decode all pages.

    Raises:
        OSError: the store failed, so that the state of the file is unknown.
    """
    if not relative.endswith(".parquet"):
        return Found(relative, problem="it is no Parquet file by its name")
    try:
        with open_parquet(output.filesystem, output.path(relative)) as parquet:
            footer = parquet.schema_arrow.metadata or {}
            if not {ATTEMPT_KEY, FINGERPRINT_KEY} <= footer.keys():
                return Found(relative, problem="no job has signed it")
            for _ in parquet.iter_batches(_BATCH_ROWS) if all_pages else ():
                pass
            table = parquet.read(columns=list(columns))  # columns that it lacks are left out
            attempt, fingerprint = footer[ATTEMPT_KEY].decode(), footer[FINGERPRINT_KEY].decode()
    except FileNotFoundError:
        return Found(relative, problem="it is gone")
    except DamagedParquet as error:
        return Found(relative, problem=f"it is torn: {error}")
    except OSError as error:
        if error.errno not in NO_FILE_ERRNOS:
            raise
        return Found(relative, problem=access.reason_of(error))
    if problem := _problem_of_keys(table, columns):
        return Found(relative, problem=f"it is torn: {problem}")
    is_number = attempt.isdecimal() and len(attempt) <= _MAX_ATTEMPT_DIGITS
    return Found(relative, table, int(attempt) if is_number else 0, fingerprint)


def _problem_of_keys(table: pa.Table, columns: Sequence[str]) -> str:
    """Return what is wrong with the `KEYS` among the columns of a table; empty if they are those of a result file."""
    for name in columns:
        if (is_kind := KEYS.get(name)) is None:
            continue
        if table.column_names.count(name) != 1:
            return f"it has no column {name!r}"
        if not is_kind(table[name].type) or table[name].null_count:
            return f"its column {name!r} holds {table[name].type} with {table[name].null_count:,} nulls"
    return ""


def partitions_of(names: Sequence[str]) -> list[Partition[Sequence[str]]]:
    """Cut a list of result files into partitions of `PARTITION_FILES`, the items of `Workers.map`."""
    parts = [names[start : start + PARTITION_FILES] for start in range(0, len(names), PARTITION_FILES)]
    return [Partition(part, len(part), part[0], part[-1]) for part in parts]


def read_all_found(
    output: OutputDir,
    names: Sequence[str],
    columns: Sequence[str],
    all_pages: bool = False,
    workers: Workers = IN_PROCESS,
) -> Iterable[Found]:
    """Call `read_found` for many files in parallel, and yield the results in order."""
    read = partial(_read_part, output, tuple(columns), all_pages)
    for files in workers.map(read, partitions_of(names), RESULT_FILE_S * len(names), "reading of results", "sink.path"):
        yield from files


def _read_part(output: OutputDir, columns: Sequence[str], all_pages: bool, names: Sequence[str]) -> list[Found]:
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        return list(pool.map(lambda name: read_found(output, name, columns, all_pages), names))


def checksum_name(relative: str) -> str:
    return f"{CHECKSUMS}/{relative}.json"


def checksum_of(data: Any, num_rows: int) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data), "num_rows": num_rows}


def write_checksum(output: OutputDir, relative: str, data: Any, num_rows: int) -> None:
    """Write the checksum record of a published file, replacing an earlier one."""
    output.write_json(checksum_name(relative), checksum_of(data, num_rows))


def note_checksum(output: OutputDir, relative: str, data: Any, num_rows: int) -> bool:
    """Create the checksum record of a published file; return False if there is one already, which is kept."""
    try:
        output.create_bytes(checksum_name(relative), as_json(checksum_of(data, num_rows)))
    except FileExistsError:
        return False
    return True
