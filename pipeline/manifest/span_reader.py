"""Reads the files of one span as a table of samples, with error rows for what cannot be read.

The table has `schemas.read_schema` and its rows in manifest order, even if files are damaged or missing. Formats are in
`pipeline.formats`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from threading import Condition
from typing import Any

import pyarrow as pa

from pipeline.formats import kind_of
from pipeline.formats.kind import Chunk, FilePiece, ReadSpec, Sample, byte_of, max_bytes_of
from pipeline.prompts.templates import whole_text
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.storage import access

NUM_PIECE_THREADS = 8
ROW_BYTES = 512
"""Memory that each row counts, at least, if the number of rows was not planned."""
MAX_MESSAGE_CHARS = 500
NoteCount = Callable[[int, int, bool], None]
"""Stores a file's ordinal, its number of samples, and whether the file is broken."""


def opened(spec: ReadSpec) -> tuple[Any, ReadSpec]:
    """Return the source's file system, and the spec with its root as a path in that file system."""
    filesystem, root = access.open_url(spec.root, "source.path")
    return filesystem, replace(spec, root=root)


def read_span(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None = None) -> pa.Table:
    """Read all samples of a span as one table with `schemas.read_schema`; errors in files become error rows. Rows
    beyond the memory limit of the span are error rows, too."""
    tables = [schemas.read_schema(spec.keep).empty_table()]
    num_left = max_bytes_of(spec, [piece.size_bytes for piece in pieces])
    gate, waiting, pending = _Gate(num_left), deque(enumerate(pieces)), deque[Future[_PieceRows]]()
    with ThreadPoolExecutor(NUM_PIECE_THREADS) as pool, closing(gate):  # starts at most one thread per piece
        for piece in pieces:
            while waiting and len(pending) < NUM_PIECE_THREADS:
                pending.append(pool.submit(_read_piece, spec, *waiting.popleft(), gate))
            rows = pending.popleft().result()
            gate.leave(rows.num_bytes)
            rows = rows.limited(num_left, "the rows of its span take more memory than allowed")
            tables += rows.tables
            num_left -= rows.num_bytes
            if rows.error is not None:
                tables.append(_lost_rows(spec, piece, rows))
            if note_count is not None and piece.stop is None and piece.num_samples is None:
                note_count(piece.ordinal, rows.next_row + (rows.error is not None), rows.error is not None)
    return _with_unique_ids(pa.concat_tables(tables).combine_chunks())


@dataclass
class _PieceRows:
    """Rows of a piece up to `next_row`, and why the rows from there on cannot be read."""

    next_row: int
    row_bytes: int = 0
    """Bytes that each row counts besides its table."""
    tables: list[pa.Table] = field(default_factory=list)
    num_bytes: int = 0
    error: Exception | None = None

    def limited(self, max_bytes: int, message: str) -> _PieceRows:
        """Return these rows without those that exceed `max_bytes`, with a ValueError in their place."""
        if self.num_bytes <= max_bytes:
            return self
        rows = _PieceRows(self.next_row, self.row_bytes, error=self.error)
        for table in self.tables:
            size_of = partial(self._first_size, table)
            num_rows = bisect_right(range(1, table.num_rows + 1), max_bytes - rows.num_bytes, key=size_of)
            rows.add(table.slice(0, num_rows))
            if num_rows < table.num_rows:
                rows.next_row, rows.error = table["row_index"][num_rows].as_py(), ValueError(message)
                break
        return rows

    def add(self, table: pa.Table) -> int:
        """Add a table; return the bytes that it counts."""
        self.tables.append(table)
        self.num_bytes += self._size(table)
        return self._size(table)

    def _first_size(self, table: pa.Table, num_rows: int) -> int:
        return self._size(table.slice(0, num_rows))

    def _size(self, table: pa.Table) -> int:
        return int(table.nbytes) + self.row_bytes * int(table.num_rows)


class _Gate:
    """Makes pieces wait that are read ahead while all pieces that are being read hold more than `max_bytes`. The first
    one, whose rows are wanted next, never waits."""

    def __init__(self, max_bytes: float) -> None:
        self._condition = Condition()
        self._max_bytes = max_bytes
        self._num_bytes = self._first = 0

    def wait(self, order: int, num_bytes: int) -> None:
        """Add bytes of the piece with this order, and wait."""
        with self._condition:
            self._num_bytes += num_bytes
            self._condition.wait_for(lambda: order <= self._first or self._num_bytes <= self._max_bytes)

    def leave(self, num_bytes: int) -> None:
        """Take away the bytes of the first piece, which has been read; the next one becomes the first."""
        with self._condition:
            self._num_bytes -= num_bytes
            self._first += 1
            self._condition.notify_all()

    def close(self) -> None:
        """Let all pieces pass."""
        with self._condition:
            self._max_bytes = inf
            self._condition.notify_all()


def _read_piece(spec: ReadSpec, order: int, piece: FilePiece, gate: _Gate) -> _PieceRows:
    """Read the rows of a piece that are not done, up to where reading fails or the memory limit of a piece."""
    is_planned = piece.stop is not None or piece.num_samples is not None
    rows, max_bytes = _PieceRows(piece.start, 0 if is_planned else ROW_BYTES), max_bytes_of(spec, [piece.size_bytes])
    try:
        filesystem, rooted = opened(spec)
        for chunk in kind_of(spec.source.kind).read(filesystem, rooted, piece):
            gate.wait(order, rows.add(_table(spec, piece, chunk)))
            rows.next_row = chunk.samples[-1].row_index + 1 if chunk.samples else rows.next_row
            if rows.num_bytes > max_bytes:
                return rows.limited(max_bytes, f"the data read so far takes more than {max_bytes} bytes")
    except Exception as error:  # decoders of damaged files raise any error; it goes into the row
        rows.error = error
    return rows


def _lost_rows(spec: ReadSpec, piece: FilePiece, rows: _PieceRows) -> pa.Table:
    """Return an error row for every row of a piece that could not be read; one for all if their number is unknown."""
    assert rows.error is not None
    next_row, known = rows.next_row, piece.num_samples if piece.stop is None else piece.stop
    message = f"{piece.path}: cannot be read from row {next_row} on: {access.reason_of(rows.error)}"
    if known is None:
        message += f"; {missing_rows(piece, next_row, byte_of(rows.error))}"
    broken = RowError("broken_shard", message)
    samples = [
        Sample(row_index, fields=dict.fromkeys(spec.fields), error=broken)
        for row_index in range(next_row, next_row + 1 if known is None else known)
    ]
    return _table(spec, piece, Chunk(samples, [pa.nulls(len(samples), kind) for kind in spec.keep.types]))


def missing_rows(piece: FilePiece, next_row: int, byte: int | None) -> str:
    """Describe how many rows are lost in a file of unknown count that cannot be read from `next_row` on.

    `byte` is the position, in the possibly compressed file, up to which it was read.
    """
    if byte is not None and byte >= piece.size_bytes:
        return "the file ends there, so at least one row is missing; it does not say how many more"
    if byte and next_row:
        rest = piece.size_bytes - byte
        about = max(1, round(rest * next_row / byte))
        return f"rows missing: about {about:,}, judged by the {rest:,} of {piece.size_bytes:,} bytes not read"
    return "at least one row is missing; how many more is not known"


def _table(spec: ReadSpec, piece: FilePiece, chunk: Chunk) -> pa.Table:
    """Convert the rows of one chunk that are not done to a table with `schemas.read_schema`."""
    indices = [index for index, sample in enumerate(chunk.samples) if not piece.is_done(sample.row_index)]
    samples, keep = [chunk.samples[index] for index in indices], chunk.keep
    if len(samples) < len(chunk.samples):
        keep = [column.take(pa.array(indices, pa.int64())) for column in keep]
    for sample in samples:
        if sample.row_index in piece.repeated and sample.id_value is not None:
            sample.error = sample.error or _repeated_id(sample.id_value)
            sample.id_value = None
    values = [
        [sample.id_value or path_id(piece.path, sample.row_index) for sample in samples],
        [piece.path] * len(samples),
        [sample.row_index for sample in samples],
        [[] if sample.error else _image_cell(sample) for sample in samples],
        [[] if sample.error else [asdict(ref) for ref in sample.videos] for sample in samples],
        [sample.fields if isinstance(sample.fields, str) else json.dumps(sample.fields) for sample in samples],
        [sample.error.code if sample.error else "" for sample in samples],
        [_message(sample.error) if sample.error else "" for sample in samples],
    ]
    schema = schemas.read_schema(spec.keep)
    columns = [pa.array(column, field.type) for column, field in zip(values, schema, strict=False)]
    return pa.table([*columns, *keep], schema=schema)


def _image_cell(sample: Sample) -> list[dict[str, bytes | str]]:
    return [{"uri": image} if isinstance(image, str) else {"bytes": image} for image in sample.images]


def path_id(path: str, row_index: int) -> str:
    """Return the id of a sample without an id column: `path#row_index`."""
    return f"{path}#{row_index}"


def _repeated_id(sample_id: str) -> RowError:
    return RowError("duplicate_id", f"the id {sample_id[:100]!r} is there twice")


def _with_unique_ids(table: pa.Table) -> pa.Table:
    """Give a row whose id an earlier row has the id `path#row_index` and the error `duplicate_id`."""
    ids = table["sample_id"].to_pylist()
    if len(set(ids)) == len(ids):
        return table
    codes, messages, cells = (table[name].to_pylist() for name in ("error_type", "error_message", "images"))
    paths, row_indices = table["source"].to_pylist(), table["row_index"].to_pylist()
    used_ids: set[str] = set()
    for index, sample_id in enumerate(ids):
        if sample_id in used_ids:
            ids[index] = path_id(paths[index], row_indices[index])
            while ids[index] in used_ids:  # the id column of another row holds this `path#row_index`
                ids[index] += "#"
            if not codes[index]:
                error = _repeated_id(sample_id)
                codes[index], messages[index], cells[index] = error.code, _message(error), []
        used_ids.add(ids[index])
    for name, values in (("sample_id", ids), ("error_type", codes), ("error_message", messages), ("images", cells)):
        position = table.schema.get_field_index(name)
        field = table.schema.field(position)
        table = table.set_column(position, field, pa.array(values, field.type))
    return table


def _message(error: RowError) -> str:
    message = whole_text(error.message)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
