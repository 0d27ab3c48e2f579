"""Reads and aggregates columns of an output's Parquet files for reports, one row group at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir

READ_FILE_S = 2e-2
"""Estimated seconds of one core to read and aggregate a result file."""


def list_tables(output: OutputDir, folders: Sequence[str]) -> list[str]:
    """Return the paths of all Parquet files in these folders, relative to the output, by folder and name."""
    return [f"{folder}/{name}" for folder in folders for name in output.list_files(folder) if name.endswith(".parquet")]


def read_tables(output: OutputDir, names: Sequence[str], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read these columns, as far as they exist, of these files."""
    for name in names:
        with access.open_file(output.filesystem, output.path(name)) as file:
            parquet = pq.ParquetFile(file)
            there = [column for column in columns if column in parquet.schema_arrow.names]
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=there)


def added(*histograms: list[int]) -> list[int]:
    """Add histograms entry by entry; shorter ones count as padded with zeros."""
    return [sum(entries) for entries in itertools.zip_longest(*histograms, fillvalue=0)]


def total(column: pa.ChunkedArray) -> Any:
    """Sum the values that are not null."""
    return pc.sum(column).as_py() or 0


def counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Count the rows of each value."""
    return {one["values"]: one["counts"] for one in pc.value_counts(column).to_pylist()}


def histogram(lists: pa.ChunkedArray) -> list[int]:
    """Sum the histograms of all rows, entry by entry; shorter lists count as padded with zeros."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = pa.table({"position": positions, "steps": pc.list_flatten(lists)})
    summed = flat.group_by("position").aggregate([("steps", "sum")]).sort_by("position")
    return list(summed["steps_sum"].to_pylist())
