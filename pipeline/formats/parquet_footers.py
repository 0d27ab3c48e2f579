"""Surveys Parquet files by their footers, and checks the row counts that footers claim."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.formats.kind import Index, Needs, Survey, survey_of
from pipeline.formats.limits import max_expanded, max_rows
from pipeline.formats.tables import DistinctSchemas
from pipeline.storage import access

NUM_FOOTER_THREADS = 16
MAX_ROWS_PER_BYTE = 1000
"""A footer with more rows than this per byte of the file counts as damaged."""


def row_groups_of(metadata: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    """Return the metadata of all row groups."""
    return [metadata.row_group(index) for index in range(metadata.num_row_groups)]


def check_footer(metadata: pq.FileMetaData, size_bytes: int) -> None:
    """Raise ValueError for a footer whose row counts are inconsistent or too large for the file."""
    rows = [group.num_rows for group in row_groups_of(metadata)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise ValueError(f"the footer promises {metadata.num_rows} rows, and its row groups {sum(rows)}")
    if metadata.num_rows > min(MAX_ROWS_PER_BYTE * size_bytes, max_rows(size_bytes)):
        raise ValueError(f"the footer promises {metadata.num_rows} rows in a file of {size_bytes} bytes")


def bytes_behind_chunks(metadata: pq.FileMetaData) -> int:
    """Return the bytes behind a column chunk that Arrow reads too, because old writers counted chunks too small."""
    writer, _, rest = (metadata.created_by or "").lower().partition(" ")
    version = re.match(r"version (\d+)\.(\d+)\.(\d+)", rest)
    is_fixed = writer != "parquet-mr" or (version is not None and tuple(map(int, version.groups())) >= (1, 2, 9))
    return 0 if is_fixed else 100


def leaves_of(metadata: pq.FileMetaData, names: Iterable[str]) -> list[int]:
    """Return the indices of the physical columns of some columns, whose names may contain dots."""
    wanted, schema = tuple(names), metadata.schema
    return [index for index in range(len(schema)) if is_part_of(schema.column(index).path, wanted)]


def is_part_of(path: str, names: Iterable[str]) -> bool:
    """Return whether the physical column of this path may be a part of one of some columns."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Read row groups and schemas from the footers."""
    distinct, indices = DistinctSchemas(), list[Index | None]()
    names = files["path"].to_pylist()
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        footers = pool.map(lambda path: _footer(filesystem, access.join(root, path)), names)
        for path, footer in zip(names, footers, strict=True):
            if footer is None:
                indices.append(None)
                continue
            metadata, schema, size_bytes = footer
            groups, most = row_groups_of(metadata), max_expanded(size_bytes)
            sizes = [min(max(0, group.total_byte_size), most) for group in groups]
            indices.append(Index([group.num_rows for group in groups], sizes))
            distinct.add(schema, path)
    return survey_of(indices, distinct.schemas)


def _footer(filesystem: Any, path: str) -> tuple[pq.FileMetaData, pa.Schema, int] | None:
    """Return metadata, Arrow schema and file size; None for an unreadable file, whose read task reports the reason."""
    try:
        with access.open_file(filesystem, path) as file, pq.ParquetFile(file) as parquet:
            size_bytes = access.size_of(file)
            check_footer(parquet.metadata, size_bytes)
            return parquet.metadata, parquet.schema_arrow, size_bytes
    except Exception:  # the read task reports the error
        return None
