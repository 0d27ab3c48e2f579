"""Reads the files of one span as a table of samples, with error rows for what cannot be read.

The table has `schemas.read_schema` and its rows in manifest order, even if files are damaged or missing. Formats are in
`pipeline.sources`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from pipeline.prompts.templates import whole_text
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.sources import kind_of
from pipeline.sources.kind import Chunk, FilePiece, ReadSpec, Sample, byte_of, max_bytes_of
from pipeline.storage import access

NUM_PIECE_THREADS = 8
MAX_MESSAGE_CHARS = 500
NoteCount = Callable[[int, int, bool], None]
"""Stores a file's ordinal, its number of samples, and whether the file is broken."""


def opened(spec: ReadSpec) -> tuple[Any, ReadSpec]:
    """Return the source's file system, and the spec with its root as a path in that file system."""
    filesystem, root = access.open_url(spec.root, "source.path")
    return filesystem, replace(spec, root=root)


def read_span(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None = None) -> pa.Table:
    """Read all samples of a span as one table with `schemas.read_schema`; errors in files become error rows."""
    with ThreadPoolExecutor(NUM_PIECE_THREADS) as pool:  # starts at most one thread per piece
        parts = list(pool.map(lambda piece: _read_piece(spec, piece, note_count), pieces))
    tables = [schemas.read_schema(spec.keep).empty_table(), *(table for part in parts for table in part)]
    return _with_unique_ids(pa.concat_tables(tables).combine_chunks())


def _read_piece(spec: ReadSpec, piece: FilePiece, note_count: NoteCount | None) -> list[pa.Table]:
    """Read the rows of a piece that are not done; if reading fails, return an error row for every lost row.

    If the number of lost rows is unknown, one error row represents all of them.
    """
    tables: list[pa.Table] = []
    next_row = piece.start
    num_bytes, max_bytes = 0, max_bytes_of(spec, piece)
    is_broken = False
    try:
        filesystem, rooted = opened(spec)
        for chunk in kind_of(spec.source.kind).read(filesystem, rooted, piece):
            table = _table(spec, piece, chunk)
            num_bytes += table.nbytes
            if num_bytes > max_bytes:
                raise ValueError(f"the data read so far takes more than {max_bytes} bytes")
            tables.append(table)
            next_row = chunk.samples[-1].row_index + 1 if chunk.samples else next_row
    except Exception as error:  # decoders of damaged files raise any error; it goes into the row
        known = piece.num_samples if piece.stop is None else piece.stop
        message = f"{piece.path}: cannot be read from row {next_row} on: {access.reason_of(error)}"
        if known is None:
            message += f"; {missing_rows(piece, next_row, byte_of(error))}"
        broken = RowError("broken_shard", message)
        lost = range(next_row, next_row + 1 if known is None else known)
        samples = [Sample(row_index, fields=dict.fromkeys(spec.fields), error=broken) for row_index in lost]
        tables.append(_table(spec, piece, Chunk(samples, [pa.nulls(len(samples), field.type) for field in spec.keep])))
        next_row, is_broken = lost.stop, True
    if note_count is not None and piece.stop is None and piece.num_samples is None:
        note_count(piece.ordinal, next_row, is_broken)
    return tables


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
        [json.dumps(sample.fields) for sample in samples],
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
    seen: set[str] = set()
    for index, sample_id in enumerate(ids):
        if sample_id in seen:
            ids[index] = path_id(paths[index], row_indices[index])
            while ids[index] in seen:  # the id column of another row holds this `path#row_index`
                ids[index] += "#"
            if not codes[index]:
                error = _repeated_id(sample_id)
                codes[index], messages[index], cells[index] = error.code, _message(error), []
        seen.add(ids[index])
    for name, values in (("sample_id", ids), ("error_type", codes), ("error_message", messages), ("images", cells)):
        position = table.schema.get_field_index(name)
        field = table.schema.field(position)
        table = table.set_column(position, field, pa.array(values, field.type))
    return table


def _message(error: RowError) -> str:
    message = whole_text(error.message)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
