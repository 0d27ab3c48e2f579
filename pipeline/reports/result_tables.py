"""Reads and aggregates columns of an output's Parquet files for reports, one row group at a time."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from files.installation import command
from pipeline.storage.damage import DamagedFile
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet

READ_FILE_S = 2e-2
"""Estimated seconds of one core to read and aggregate a result file."""


def list_tables(output: OutputDir, folders: Sequence[str]) -> list[str]:
    """Return the paths of all Parquet files in these folders, relative to the output, by folder and name."""
    return [f"{folder}/{name}" for folder in folders for name in output.list_files(folder) if name.endswith(".parquet")]


def read_tables(output: OutputDir, names: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read these columns, as far as they exist, of these files; DamagedFile for a damaged one."""
    for name in names:
        with open_result(output, name, columns) as (parquet, there):
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=there)


@contextlib.contextmanager
def open_result(output: OutputDir, name: str, columns: Sequence[str]) -> Iterator[tuple[pq.ParquetFile, list[str]]]:
    """Open a file for reading in the context, with those of `columns` that it has; DamagedFile if it is damaged."""
    try:
        with open_parquet(output.filesystem, output.path(name)) as parquet:
            yield parquet, [column for column in columns if column in parquet.schema_arrow.names]
    except DamagedParquet as error:
        advice = f"{shlex.join(command('check'))} lists damaged files"
        raise DamagedFile(output.shown(name), name, f"it is torn: {error}", advice) from None


def added(*histograms: list[int]) -> list[int]:
    """Add histograms entry by entry; shorter ones count as padded with zeros."""
    return [sum(entries) for entries in itertools.zip_longest(*histograms, fillvalue=0)]


def total(column: pa.ChunkedArray) -> Any:
    """Sum the values that are not null."""
    return pc.sum(column).as_py() or 0


def counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Count the rows of each value."""
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}


def histogram(lists: pa.ChunkedArray) -> list[int]:
    """Sum the histograms of all rows, entry by entry; shorter lists count as padded with zeros."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = pa.table({"position": positions, "steps": pc.list_flatten(lists)})
    summed = flat.group_by("position").aggregate([("steps", "sum")]).sort_by("position")
    return list(summed["steps_sum"].to_pylist())
