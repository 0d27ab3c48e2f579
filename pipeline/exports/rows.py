"""Reads the rows of published files for exports, and names their columns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from pipeline.exports.ledger import ExportPart, published, state_of
from pipeline.manifest.done_bitmap import DoneBitmap, PathIndex
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import read_parts, with_counts
from pipeline.output.accounts import locate
from pipeline.output.files import read_found
from pipeline.output.recorded_job import RecordedJob
from pipeline.rows.schemas import job_schema
from pipeline.storage import access
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

NUM_THREADS = 8
"""Number of files that a task writes at the same time."""
KEY_COLUMNS = ("sample_id", "source", "row_index")
ROW_ERRNOS = frozenset({1, 2, 13, 20, 21, 22, 27, 36, 40})
"""EPERM, ENOENT, EACCES, ENOTDIR, EISDIR, EINVAL, EFBIG, ENAMETOOLONG, ELOOP: errors of one path. All other errors, for
example of a full disk, end the export."""
Value = TypeVar("Value")


def check_columns(job: RecordedJob[Any], columns: Sequence[str], dotted: str) -> None:
    """Raise ConfigError unless the job's output has all of these columns."""
    known = output_columns(job)
    for name in columns if known else ():
        if name not in known:
            raise ConfigError(
                f"{dotted}: the output in {job.output.shown()} has no column {name!r}; see sink.keep_columns"
            )


def output_columns(job: RecordedJob[Any]) -> tuple[str, ...]:
    """Return the columns of a job's rows; empty for images of which none is published yet."""
    if job.makes_images:
        return job.columns
    config = job.config
    return tuple(job_schema(config, job.manifest.keep).names)


def parts_of(output: OutputDir, row_s: float, rows_per_file: int) -> list[ExportPart]:
    """Return a part for each published file of `data/`; a row takes about `row_s` seconds of one core."""
    states = published(output, DATA)
    return [ExportPart(name, state, name, row_s * rows_per_file, (name,)) for name, state in states.items()]


def parts_of_sources(output: OutputDir, byte_s: float) -> list[ExportPart]:
    """Return a part for each file of the source whose samples all have rows; `byte_s` is the time per byte of the file.
    Its item is the file's path and the published files with its rows, and its state is that of these files."""
    manifest = read_manifest(output)
    paths, done = PathIndex(manifest.files["path"]), DoneBitmap(manifest.counts)
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, state in published(output, DATA, ERRORS).items():
        table = read_rows(output, name, ())
        [located] = locate([table], paths)
        inside = done.is_inside(located.files, located.rows)
        done.add(located.files[inside], located.rows[inside])
        for file in np.unique(located.files[inside]).tolist():
            holders.setdefault(file, []).append((name, state))
    parts = []
    for file, some in sorted(holders.items()):
        if done.is_complete(file):
            path, size = (manifest.files[name][file].as_py() for name in ("path", "size_bytes"))
            state = state_of([value for pair in some for value in pair])
            names = [name for name, _ in some]
            parts.append(ExportPart(path, state, (path, names), size * byte_s, tuple(names)))
    return parts


def read_rows(output: OutputDir, name: str, columns: Iterable[str]) -> pa.Table:
    """Read columns of a published file; RuntimeError if it is damaged."""
    names = [*dict.fromkeys((*KEY_COLUMNS, *columns))]
    file = read_found(output, name, names)
    lost = [] if file.table is None else [column for column in names if column not in file.table.column_names]
    if file.table is None or lost:
        problem = file.problem or f"it has no column {lost[0]!r}"
        raise RuntimeError(
            f"{output.shown(name)}: {problem}; the job's own command sets it aside and makes its rows again"
        )
    return file.table


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table; values that Python has no type for, such as dates after the year 9999, as text."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError, ArithmeticError):
            columns[name] = [_value(cell) for cell in column]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _value(scalar: Any) -> Any:
    """Return the value of a scalar; as text, if Python has no type for it."""
    with contextlib.suppress(ValueError, OverflowError, ArithmeticError):
        return scalar.as_py()
    for kind in (pa.int64(), pa.int32(), pa.string()):
        with contextlib.suppress(pa.ArrowException, ValueError, OverflowError):
            return str(scalar.cast(kind).as_py())
    return None


@lru_cache(maxsize=1)
def manifest_of(output: OutputDir, listing: str) -> Manifest:
    """Call `read_manifest` once in this process for all parts of an export; `listing` is the hash of its paths."""
    return read_manifest(output)


def hash_of(manifest: Manifest) -> str:
    """Return a hash of the paths of a manifest."""
    digest = hashlib.sha256()
    for chunk in manifest.files["path"].chunks:
        digest.update(chunk.buffers()[2] or b"")
    return digest.hexdigest()


def read_manifest(output: OutputDir) -> Manifest:
    """Read the manifest of an output, with the numbers of samples that are known by now."""
    manifest = read_parts(output)
    assert manifest is not None, "an export reads the manifest before its tasks start"
    return with_counts(manifest, output)


def is_listed(table: pa.Table, manifest: Manifest) -> list[bool]:
    """Return for each row whether its source is a file of the manifest."""
    sources = table["source"].combine_chunks().dictionary_encode()
    known = PathIndex(manifest.files["path"]).find(sources.dictionary) >= 0
    listed: list[bool] = known[np.asarray(sources.indices)].tolist() if table.num_rows else []
    return listed


def in_threads(function: Callable[[Any], Value], items: Iterable[Any]) -> Iterator[Value]:
    """Call a function for many items, `NUM_THREADS` at a time, and yield the results in order."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from pool.map(function, items)


def as_json(row: dict[str, Any], columns: Sequence[str]) -> Any:
    """Return the named values of a row as JSON data: other types as text, numbers that are not finite as null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {str(key): finite(inner) for key, inner in value.items()}
        return [finite(inner) for inner in value] if isinstance(value, list) else value

    return json.loads(json.dumps({name: finite(row[name]) for name in columns}, default=str))


def json_bytes(value: Any) -> bytes:
    """Return JSON in UTF-8; with halves of surrogate pairs, which files of the user may have, all of it in ASCII."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def reason(error: Exception) -> str:
    """Return why a row was refused, without credentials; raise the error if it is not one of this row alone."""
    if isinstance(error, OSError) and (error.errno in ROW_ERRNOS or isinstance(error, FileNotFoundError)):
        return access.reason_of(error)
    raise error
