"""Reads the source kind `parquet`: one row is one sample. Samples are read page by page from the needed columns only;
pages are checked before they are decompressed. If a row group is cut into several pieces, a process continues at its
last position."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.formats import columns
from pipeline.formats.kind import Chunk, FilePiece, IdRows, ReadSpec, Sample, SourceKind
from pipeline.formats.limits import MAX_BLOCK_BYTES, MAX_EXPANSION
from pipeline.formats.nested import holders
from pipeline.formats.parquet_footers import (
    bytes_behind_chunks,
    check_footer,
    is_part_of,
    leaves_of,
    row_groups_of,
    survey,
)
from pipeline.formats.parquet_pages import BATCH_BYTES, CheckedFile, ColumnChunk, Restart
from pipeline.formats.tables import chunks_of, id_rows, lost_chunk, needed_columns
from pipeline.storage import access

BATCH_ROWS = 128
"""Maximum number of rows decoded at a time; limits memory besides the table that is being built."""
ID_BATCH_ROWS = 65_536
"""Maximum number of rows decoded at a time if only ids are read, or if a column is read as dictionary, because each
batch has the whole dictionary; a multiple of `BATCH_ROWS`."""
BUFFER_BYTES = 4 * 1024 * 1024
"""Bytes of each column chunk that are read at a time."""
SUSPICIOUS_RATIO = 50
"""A column chunk with a higher compression ratio may repeat one large value many times."""
MAX_DECODED_BYTES = 16 * 1024**3
"""Maximum bytes that the rows of a row group may decode to, unless these are less than `MAX_EXPANSION` times its bytes;
limits the time to reach a row."""


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
                if isinstance(batch, Lost):
                    yield lost_chunk(spec, piece.path, range(first, batch.stop), batch.error)
                else:
                    yield from chunks_of(spec, piece.path, batch, first)
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
    for max_rows in (ID_BATCH_ROWS, BATCH_ROWS):
        with closing(RowsOfFile(filesystem, path, names, piece, max_rows)) as rows:
            stop = (rows.num_rows if piece.stop is None else piece.stop) if rows.names else piece.start
            for first, batch in rows.until(stop):
                if isinstance(batch, Lost):
                    if max_rows == BATCH_ROWS:
                        continue
                    break
                num_yielded = max(0, next_row - first)
                if num_yielded < batch.num_rows:
                    for next_row, ids in id_rows(spec, piece.path, batch.slice(num_yielded), first + num_yielded):  # noqa: B007
                        yield ids
            else:
                return


@dataclass(frozen=True)
class Lost:
    """Rows up to `stop` (exclusive) that cannot be read because of an error."""

    stop: int
    error: Exception


class RowsOfFile:
    """A reader of the needed columns of a file from row `piece.start` on, at most `max_rows` at a time; can be
    interrupted and resumed."""

    def __init__(
        self, filesystem: Any, path: str, names: list[str], piece: FilePiece, max_rows: int = BATCH_ROWS
    ) -> None:
        self._file = CheckedFile(access.open_file(filesystem, path))
        self._parquet: pq.ParquetFile | None = None
        self._as_dictionary: set[str] = set()
        self._max_rows = self._group_rows = max_rows
        self._num_decoded = self._max_decoded = 0
        self._has_failed = False
        try:
            self._open()
            size = self._file.size
            metadata = self._metadata
            check_footer(metadata, size)
            self.num_rows: int = metadata.num_rows
            if piece.num_samples is not None and self.num_rows != piece.num_samples:
                raise ValueError(f"the file has {self.num_rows} rows and had {piece.num_samples} when the job began")
            self.names = holders(names, self._schema.names)
            self._leaves = leaves_of(metadata, self.names)
            self._starts: list[int] = list(accumulate((group.num_rows for group in row_groups_of(metadata)), initial=0))
            self._group = max((index for index, start in enumerate(self._starts) if start <= piece.start), default=0)
            self._position = self._starts[self._group]
            self._batches: Iterator[pa.RecordBatch] | None = None
            self._rest: pa.RecordBatch | None = None
            self.skip_to = piece.start
            """Rows before this one are skipped."""
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # Without checksums a flipped byte inside a compressed page can pass as other values.
        self._parquet = pq.ParquetFile(
            self._file,
            page_checksum_verification=True,
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
            read_dictionary=sorted(self._as_dictionary) or None,
        )
        self._metadata, self._schema = self._parquet.metadata, self._parquet.schema_arrow

    @property
    def position(self) -> int:
        return max(self._position, self.skip_to)

    @property
    def in_a_group(self) -> bool:
        """Whether the next row is inside a row group and not its first row, and no row group has failed."""
        return not self._has_failed and self.position < self.num_rows and self.position not in self._starts

    def until(self, stop: int) -> Iterator[tuple[int, pa.RecordBatch | Lost]]:
        """Yield (first row, batch) from the current position up to `stop`. The rows of a row group from an error on are
        `Lost`. Raises ValueError if the file ends before, and the error of the file itself if it cannot be read."""
        while self._position < min(stop, self.num_rows):
            try:
                batch = self._rest if self._rest is not None else self._next_batch()
            except Restart as restart:
                self._restart(restart)
                continue
            except Exception as error:
                if not self._file.is_readable:
                    raise
                first, end = self.position, self._starts[self._group + 1]
                self._has_failed = True
                self._group, self._position, self._batches = self._group + 1, end, None
                if first < min(end, stop):
                    yield first, Lost(min(end, stop), error)
                continue
            self._rest = None
            low, high = max(self.skip_to - self._position, 0), min(stop - self._position, batch.num_rows)
            first = self._position + low
            if high < batch.num_rows:
                self._rest = batch.slice(high)
            self._position += high
            if low < high:
                yield first, batch.slice(low, high - low)
        if stop > self.num_rows:
            raise ValueError(f"the file ends at row {self.num_rows}, and row {stop} was asked for")

    def _next_batch(self) -> pa.RecordBatch:
        """Decode the next rows of the row group, or of the next one that has rows."""
        while self._position >= self._starts[self._group + 1]:
            self._group, self._batches, self._group_rows = self._group + 1, None, self._max_rows
        self._batches = self._batches or self._start_group()
        if self._num_decoded > self._max_decoded:
            raise ValueError(f"the rows of the row group decode to more than {self._max_decoded} bytes")
        try:
            batch = next(self._batches, None)
        except Exception:
            if self._file.error is not None:
                raise self._file.error from None
            raise
        if batch is None:
            promised = self._starts[self._group + 1]
            raise ValueError(f"the row group ends at row {self._position} although its footer promises {promised}")
        self._num_decoded += batch.nbytes
        return batch

    def _start_group(self) -> Iterator[pa.RecordBatch]:
        """Begin to decode a row group, and watch its column chunks."""
        assert self._parquet is not None
        metadata, group = self._metadata, self._metadata.row_group(self._group)
        names = [name for name in self.names if not any(is_part_of(path, [name]) for path in self._as_dictionary)]
        most = ID_BATCH_ROWS if self._as_dictionary else self._max_rows
        num_rows = min(self._group_rows, batch_rows(metadata, [self._group], names, self._schema, most))
        chunks, num_bytes = [], 0
        for leaf in self._leaves:
            column, kind = group.column(leaf), metadata.schema.column(leaf)
            if kind.length > MAX_BLOCK_BYTES:
                raise ValueError(f"the column {kind.path!r} has values of {kind.length} bytes")
            num_rows = min(num_rows, max(1, BATCH_BYTES // max(1, kind.length)))
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            size = max(0, min(column.total_compressed_size, self._file.size - start))
            num_bytes += size
            as_dictionary = kind.path in self._as_dictionary
            chunks.append(ColumnChunk(start, size, kind, as_dictionary, num_rows, bytes_behind_chunks(metadata)))
        for chunk in chunks:
            chunk.max_rows = num_rows
        self._file.watched, self._file.error = chunks, None
        self._num_decoded, self._max_decoded = 0, max(MAX_DECODED_BYTES, MAX_EXPANSION * num_bytes)
        return iter(self._parquet.iter_batches(num_rows, [self._group], self.names, use_threads=False))

    def _restart(self, restart: Restart) -> None:
        """Read the row group again from its beginning, up to the current position without yielding rows."""
        if restart.max_rows is not None:
            self._group_rows = restart.max_rows
        else:
            self._as_dictionary.add(restart.as_dictionary)
            self._group_rows = ID_BATCH_ROWS
            self._file.watched = []
            self._open()
        self.skip_to = self.position
        self._position, self._batches = self._starts[self._group], None

    def close(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._file.close()


def batch_rows(
    metadata: pq.FileMetaData, groups: list[int], names: list[str], schema: pa.Schema, max_rows: int = BATCH_ROWS
) -> int:
    """Return the number of rows to decode at a time, from the footer. Every row may reference the same huge value of a
    dictionary page; for bytes columns and suspiciously compressed columns with a dictionary, the batch stays within
    `BATCH_BYTES` then. Other columns with a dictionary reduce it to `BATCH_ROWS` at most. Large values reduce it by
    their mean size. Larger batches are multiples of `BATCH_ROWS`, so that damage is met at the same rows."""
    num_rows = max_rows
    binary = {name for name in names if columns.holds_bytes(schema.field(name).type)}
    leaves = leaves_of(metadata, names)
    for group in (metadata.row_group(index) for index in groups):
        for column in (group.column(index) for index in leaves):
            if column.physical_type != "BYTE_ARRAY":
                continue
            size = max(1, column.total_uncompressed_size)
            num_rows = min(num_rows, max(1, BATCH_BYTES * max(1, group.num_rows) // size))
            if column.has_dictionary_page:
                is_suspicious = is_part_of(column.path_in_schema, binary)
                is_suspicious = is_suspicious or size > SUSPICIOUS_RATIO * max(1, column.total_compressed_size)
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


_CODECS = ("gzip", "snappy", "zstd", "brotli", "lz4")
SUFFIXES = (".parquet", ".pq", *(f".parquet.{codec}" for codec in _CODECS))
"""Suffixes in folders; pandas' users name files after the codec of their pages."""
KIND = SourceKind("parquet", SUFFIXES, survey, read, read_ids=read_ids)
