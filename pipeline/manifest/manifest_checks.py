"""Checks the values of a manifest part, from which memory is reserved and rows are read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pipeline.manifest.done_bitmap import UNKNOWN, Bools, Ints

MAX_SAMPLES = 1 << 34
"""Maximum number of samples of a manifest: each bitmap of them takes 2 GiB then."""
MAX_ROWS_PER_BYTE = 1000
"""Maximum number of rows per byte of a file whose size is known."""
MAX_UNCOUNTED_ROWS = 1 << 30
"""Maximum number of rows of a file whose number of rows is known only after reading."""
_ROWS_PER_UNCOUNTED_BYTE = 64


def most_rows(sizes: Ints) -> Ints:
    """Return the largest number of rows of files of unknown count with these sizes in bytes (0: unknown size)."""
    bounds = np.clip(_ROWS_PER_UNCOUNTED_BYTE * sizes, 1 << 20, MAX_UNCOUNTED_ROWS)
    return np.asarray(np.where(sizes > 0, bounds, MAX_UNCOUNTED_ROWS))


def as_files(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table read from a part with the types of `schema`; ValueError for other columns or kinds of types."""
    table = table.replace_schema_metadata(None)
    if table.schema.names != schema.names:
        raise ValueError(f"its columns are {', '.join(table.schema.names):.200}")
    for name, kind in zip(schema.names, schema.types, strict=True):
        actual_type = table.schema.field(name).type
        if _kind(actual_type) != _kind(kind):
            raise ValueError(f"its column {name!r} holds {actual_type}")
    return table.cast(schema)


def _kind(kind: pa.DataType) -> str:
    if pt.is_list(kind) or pt.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pt.is_integer(kind):
        return "integer"
    return "string" if pt.is_string(kind) or pt.is_large_string(kind) else str(kind)


def problem_of_files(files: pa.Table) -> str:
    """Return what is wrong with a table of files (`manifest.SCHEMA`), with the path of the first wrong file; empty if
    nothing is."""
    for name in files.schema.names:
        if name != "num_samples" and files[name].null_count:
            return f"its column {name!r} has nulls"
    sizes = files["size_bytes"].to_numpy()
    counts = files["num_samples"].fill_null(UNKNOWN).to_numpy()
    is_counted = np.asarray(files["num_samples"].is_valid())

    def first(wrong: Bools, what: str) -> str:
        row = int(np.flatnonzero(wrong)[0])
        return f"{files['path'][row].as_py()}: {what} ({counts[row]:,} rows, {sizes[row]:,} bytes)"

    most = np.where(sizes > 0, np.minimum(sizes, MAX_SAMPLES) * MAX_ROWS_PER_BYTE, MAX_SAMPLES)
    if (wrong := (sizes < 0) | (is_counted & ((counts < 0) | (counts > most)))).any():
        return first(wrong, "it cannot have so many rows")
    if float(total := counts[is_counted].sum(dtype=np.float64)) > MAX_SAMPLES:
        return f"its files have {total:,.0f} rows, more than {MAX_SAMPLES:,}"
    groups = {name: _lists(files[f"row_group_{name}"]) for name in ("rows", "bytes", "lines")}
    for lengths, values in groups.values():
        if (values < 0).any() or (values > np.iinfo(np.int64).max >> 20).any():
            return first(lengths > 0, "its row groups are damaged")
    lengths, values = groups["rows"]
    is_cut = lengths > 0
    wrong = (groups["bytes"][0] != lengths) | ((groups["lines"][0] != lengths) & (groups["lines"][0] > 0))
    if (wrong := wrong | (is_cut & (_sums(lengths, values) != counts))).any():
        return first(wrong, "its row groups have another number of rows")
    lengths, values = _lists(files["repeated_rows"])
    limits = np.where(is_counted, counts, MAX_UNCOUNTED_ROWS)
    if ((values < 0) | (values >= np.repeat(limits, lengths))).any():
        return first(lengths > 0, "its repeated rows are not in it")
    return ""


def _lists(column: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """Return the lengths and all values of a column of lists; −1 for a value that is null."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return lengths, pc.list_flatten(column).fill_null(-1).to_numpy()


def _sums(lengths: Ints, values: Ints) -> Ints:
    sums = np.concatenate([[0], np.cumsum(values)])
    ends = np.cumsum(lengths)
    return np.asarray(sums[ends] - sums[ends - lengths])
