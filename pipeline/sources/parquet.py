"""Reads the source kind `parquet`: one row is one sample. The survey reads footers; samples are read page by page from
the needed columns only. If a row group is cut into several pieces, a process continues at its last position."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.sources import columns
from pipeline.sources.kind import Chunk, FilePiece, IdRows, Index, Kind, Needs, ReadSpec, Sample, Survey, survey_of
from pipeline.sources.tables import DistinctSchemas, chunk_of, id_rows, needed_columns
from pipeline.storage import access

NUM_FOOTER_THREADS = 16
BATCH_ROWS = 128
"""Maximum number of rows decoded at a time; limits memory besides the table that is being built."""
ID_BATCH_ROWS = 65_536
"""Maximum number of rows decoded at a time if only ids are read, a multiple of `BATCH_ROWS`."""
BATCH_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a batch in the worst case that every row has the largest value of its row group."""
BUFFER_BYTES = 4 * 1024 * 1024
"""Bytes of each column chunk that are read at a time."""
MAX_ROWS_PER_BYTE = 1000
"""A footer with more rows than this per byte of the file counts as damaged."""
SUSPICIOUS_RATIO = 50
"""A column chunk with a higher compression ratio may repeat one large value many times."""


def _footer(filesystem: Any, path: str) -> tuple[pq.FileMetaData, pa.Schema] | None:
    """Return metadata and Arrow schema; None for an unreadable file, whose read task reports the reason."""
    try:
        with access.open_file(filesystem, path) as file, pq.ParquetFile(file) as parquet:
            check_footer(parquet.metadata, access.size_of(file))
            return parquet.metadata, parquet.schema_arrow
    except Exception:  # the read task reports the error
        return None


def _groups_of(metadata: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    return [metadata.row_group(index) for index in range(metadata.num_row_groups)]


def check_footer(metadata: pq.FileMetaData, size_bytes: int) -> None:
    """Raise ValueError for a footer whose row counts are inconsistent or too large for the file."""
    rows = [group.num_rows for group in _groups_of(metadata)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise ValueError(f"the footer promises {metadata.num_rows} rows, and its row groups {sum(rows)}")
    if metadata.num_rows > MAX_ROWS_PER_BYTE * size_bytes:
        raise ValueError(f"the footer promises {metadata.num_rows} rows in a file of {size_bytes} bytes")


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Read row groups and schemas from the footers."""
    schemas, indices = DistinctSchemas(), list[Index | None]()
    names = files["path"].to_pylist()
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        footers = pool.map(lambda path: _footer(filesystem, access.join(root, path)), names)
        for path, footer in zip(names, footers, strict=True):
            if footer is None:
                indices.append(None)
                continue
            metadata, schema = footer
            groups = _groups_of(metadata)
            sizes = [max(0, group.total_byte_size) for group in groups]
            indices.append(Index([group.num_rows for group in groups], sizes))
            schemas.add(schema, path)
    return survey_of(indices, schemas.found)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """Read the rows of a piece, one batch per chunk."""
    names = needed_columns(spec)
    path = access.join(spec.root, piece.path)
    key = (spec.root, piece.path, piece.num_samples, tuple(names))
    rows = _take(key, piece.start) or RowsOfFile(filesystem, path, names, piece)
    try:
        stop = rows.num_rows if piece.stop is None else piece.stop
        if rows.names:
            for first, batch in rows.until(stop):
                yield chunk_of(spec, piece.path, batch, first)
        else:
            for first in range(piece.start, stop, BATCH_ROWS):
                yield Chunk([Sample(index) for index in range(first, min(first + BATCH_ROWS, stop))], [])
    except BaseException:
        rows.close()
        raise
    _put(key, rows)


def read_ids(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[IdRows]:
    """Yield the ids of a piece from the id column alone. If a batch cannot be read, the piece is read again in batches
    of `BATCH_ROWS`, so that the rows before the damage are those that `read` yields if it begins with this piece."""
    assert spec.source.id_column is not None
    path, names = access.join(spec.root, piece.path), [spec.source.id_column]
    next_row = piece.start
    try:
        for first, batch in _batches(filesystem, path, names, piece, ID_BATCH_ROWS):
            yield id_rows(spec, piece.path, batch, first)
            next_row = first + batch.num_rows
    except Exception:
        for first, batch in _batches(filesystem, path, names, piece, BATCH_ROWS):
            num_yielded = max(0, next_row - first)
            if num_yielded < batch.num_rows:
                yield id_rows(spec, piece.path, batch.slice(num_yielded), first + num_yielded)


def _batches(
    filesystem: Any, path: str, names: list[str], piece: FilePiece, max_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    with closing(RowsOfFile(filesystem, path, names, piece, max_rows)) as rows:
        if rows.names:
            yield from rows.until(rows.num_rows if piece.stop is None else piece.stop)


class RowsOfFile:
    """A reader of the needed columns of a file from row `piece.start` on, at most `max_rows` at a time; can be
    interrupted and resumed."""

    def __init__(
        self, filesystem: Any, path: str, names: list[str], piece: FilePiece, max_rows: int = BATCH_ROWS
    ) -> None:
        self._file = access.open_file(filesystem, path)
        self._parquet: pq.ParquetFile | None = None
        try:
            # Without checksums a flipped byte inside a compressed page can pass as other values.
            self._parquet = pq.ParquetFile(self._file, page_checksum_verification=True, buffer_size=BUFFER_BYTES)
            metadata, schema = self._parquet.metadata, self._parquet.schema_arrow
            check_footer(metadata, access.size_of(self._file))
            self.num_rows: int = metadata.num_rows
            if piece.num_samples is not None and self.num_rows != piece.num_samples:
                raise ValueError(f"the file has {self.num_rows} rows and had {piece.num_samples} when the job began")
            self.names = [name for name in names if name in schema.names]
            self._starts = list(accumulate((group.num_rows for group in _groups_of(metadata)), initial=0))[:-1]
            first = max((index for index, start in enumerate(self._starts) if start <= piece.start), default=0)
            groups = list(range(first, metadata.num_row_groups))
            self._position = self._starts[first] if self._starts else 0
            self._rest: pa.RecordBatch | None = None
            self.skip_to = piece.start
            """Rows before this one are skipped."""
            self._batches = self._parquet.iter_batches(
                batch_rows(metadata, groups, self.names, schema, max_rows),
                row_groups=groups,
                columns=self.names,
                use_threads=False,
            )
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        return max(self._position, self.skip_to)

    @property
    def in_a_group(self) -> bool:
        """Whether the next row is inside a row group and not its first row."""
        return self.position < self.num_rows and self.position not in self._starts

    def until(self, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (first row, batch) from the current position up to `stop`; ValueError if the file ends before."""
        while self._position < stop:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            self._rest = None
            if batch is None:
                raise ValueError(f"the file ends at row {self._position} although its footer promises {self.num_rows}")
            low, high = max(self.skip_to - self._position, 0), min(stop - self._position, batch.num_rows)
            first = self._position + low
            if high < batch.num_rows:
                self._rest = batch.slice(high)
            self._position += high
            if low < high:
                yield first, batch.slice(low, high - low)

    def close(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._file.close()


def batch_rows(
    metadata: pq.FileMetaData, groups: list[int], names: list[str], schema: pa.Schema, max_rows: int = BATCH_ROWS
) -> int:
    """Return the number of rows to decode at a time. Every row may reference the same huge value of a dictionary page;
    for bytes columns and suspiciously compressed columns with a dictionary, the batch stays within `BATCH_BYTES`
    then. Other columns with a dictionary reduce it to `BATCH_ROWS` at most. Larger batches are multiples of
    `BATCH_ROWS`, so that damage is met at the same rows."""
    num_rows = max_rows
    binary = {name for name in names if columns.holds_bytes(schema.field(name).type)}
    for group in (metadata.row_group(index) for index in groups):
        for column in (group.column(index) for index in range(group.num_columns)):
            name = column.path_in_schema.partition(".")[0]
            if name not in names or column.physical_type != "BYTE_ARRAY" or not column.has_dictionary_page:
                continue
            size = max(1, column.total_uncompressed_size)
            is_suspicious = name in binary or size > SUSPICIOUS_RATIO * max(1, column.total_compressed_size)
            num_rows = min(num_rows, max(1 if is_suspicious else BATCH_ROWS, BATCH_BYTES // size))
    return num_rows if num_rows < BATCH_ROWS else num_rows // BATCH_ROWS * BATCH_ROWS


_LOCK = threading.Lock()
_open_readers: dict[tuple[Any, ...], RowsOfFile] = {}
"""At most one open reader that stopped inside a row group, for the next piece of that group, by file and columns."""


def _take(key: tuple[Any, ...], row: int) -> RowsOfFile | None:
    """Take the kept reader if it is for this file and not past `row`; None if it is not."""
    with _LOCK:
        if key not in _open_readers or _open_readers[key].position > row:
            return None
        rows = _open_readers.pop(key)
    rows.skip_to = row
    return rows


def _put(key: tuple[Any, ...], rows: RowsOfFile) -> None:
    """Keep this reader if it is inside a row group, closing the previously kept reader; otherwise close it."""
    closing = [rows]
    if rows.in_a_group:
        with _LOCK:
            closing = list(_open_readers.values())
            _open_readers.clear()
            _open_readers[key] = rows
    for reader in closing:
        reader.close()


KIND = Kind("parquet", (".parquet", ".pq"), survey, read, read_ids=read_ids)
