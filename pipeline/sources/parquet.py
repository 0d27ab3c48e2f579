"""The source kind `parquet`: one row is one sample; images as bytes, URIs, `struct<bytes, path>`, or lists of those.

Reads footers for the survey and only the needed columns for samples. Knows nothing of pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pipeline import storage
from pipeline.rows import RowError
from pipeline.sources import columns
from pipeline.sources.cells import add_images
from pipeline.sources.kind import Chunk, FilePiece, Kind, Needs, ReadSpec, Sample, Survey, no_row_groups, resolve_id

NUM_FOOTER_THREADS = 16
BATCH_ROWS = 128
"""Rows decoded at a time: bounds memory beside the table that is being built."""


# --- before reading ------------------------------------------------------------------------------------------------


def _footer(filesystem: Any, path: str) -> tuple[pq.FileMetaData, pa.Schema] | None:
    """Metadata and Arrow schema, or None for a file that cannot be read: its read task will say why."""
    try:
        with storage.open_file(filesystem, path) as file, pq.ParquetFile(file) as parquet:
            return parquet.metadata, parquet.schema_arrow
    except Exception:  # a damaged footer raises whatever the decoder met
        return None


def survey(filesystem: Any, root: str, paths: pa.ChunkedArray, needs: Needs) -> Survey:
    """Row counts and row groups from the footers, and the types of kept columns over all files.

    Raises:
        ConfigError: a needed column is missing in a file, has an unusable type, or kept types conflict.
    """
    num_samples: list[int | None] = []
    group_rows: list[list[int]] = []
    group_bytes: list[list[int]] = []
    keep: dict[str, pa.Field] = {}
    checked: list[pa.Schema] = []
    names = paths.to_pylist()
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        footers = pool.map(lambda path: _footer(filesystem, storage.join(root, path)), names)
        for path, footer in zip(names, footers, strict=True):
            if footer is None:
                num_samples.append(None)
                group_rows.append([])
                group_bytes.append([])
                continue
            metadata, schema = footer
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            num_samples.append(metadata.num_rows)
            group_rows.append([group.num_rows for group in groups])
            group_bytes.append([max(0, group.total_byte_size) for group in groups])
            if any(schema.equals(known) for known in checked):
                continue
            checked.append(schema)
            needs.require(schema.names, path)
            columns.check(schema, needs, path)
            for name in needs.keep:
                found = pa.field(name, columns.unpacked(schema.field(name).type))
                keep[name] = columns.unify(keep[name], found, path) if name in keep else found
    fields = [pa.field(name, columns.plain(keep[name].type) if name in keep else pa.string()) for name in needs.keep]
    integers = pa.list_(pa.int64())
    return Survey(
        pa.array(num_samples, pa.int64()),
        pa.array(group_rows, integers),
        pa.array(group_bytes, integers),
        pa.schema(fields),
        no_row_groups(len(names)),
    )


# --- reading -------------------------------------------------------------------------------------------------------


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The rows of a piece, a batch at a time.

    Raises:
        Exception: the file is damaged or no longer the one that the manifest lists.
    """
    needs = Needs(spec.source, dict.fromkeys(spec.fields, ""), tuple(spec.keep.names))
    names = list(needs.columns())
    path = storage.join(spec.root, piece.path)
    # Without checksums a flipped byte inside a compressed page can pass as other values.
    with storage.open_file(filesystem, path) as file, pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        num_rows = parquet.metadata.num_rows
        if piece.num_samples is not None and num_rows != piece.num_samples:
            raise ValueError(f"the file has {num_rows} rows and had {piece.num_samples} when the job began")
        stop = num_rows if piece.stop is None else piece.stop
        if not names:
            yield Chunk([Sample(index) for index in range(piece.start, stop)], [])
            return
        groups, skip = _groups_between(parquet.metadata, piece.start, stop)
        position = piece.start - skip
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=names, use_threads=False):
            low, high = max(piece.start - position, 0), min(stop - position, batch.num_rows)
            if low < high:
                yield _chunk(spec, batch.slice(low, high - low), position + low)
            position += batch.num_rows
            if position >= stop:
                break
        if position < stop:
            raise ValueError(f"the file ends at row {position} although its footer promises {num_rows}")


def _groups_between(metadata: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows `start` to `stop`, and how many rows of the first lie before `start`."""
    groups: list[int] = []
    skip = position = 0
    for index in range(metadata.num_row_groups):
        end = position + metadata.row_group(index).num_rows
        if position < stop and end > start:
            if not groups:
                skip = start - position
            groups.append(index)
        position = end
    return groups, skip


def invalid_rows(values: pa.Array) -> set[int]:
    """The rows whose values break Arrow's own rules, in practice text that is not UTF-8."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return {index for index in range(len(values)) if not _is_valid(values.slice(index, 1))}
    return set()


def _is_valid(values: pa.Array) -> bool:
    try:
        # A slice shares its parents' buffers: only a copy is judged by its own rows.
        pa.concat_arrays([values, values.slice(0, 0)]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _chunk(spec: ReadSpec, batch: pa.RecordBatch, first_index: int) -> Chunk:
    samples = [Sample(first_index + offset) for offset in range(batch.num_rows)]

    def column(name: str) -> pa.Array:
        values: pa.Array = batch.column(batch.schema.get_field_index(name))
        return values.dictionary_decode() if pt.is_dictionary(values.type) else values

    def usable(name: str) -> tuple[pa.Array, set[int]]:
        values = column(name)
        invalid = invalid_rows(values)
        for offset in invalid:
            if samples[offset].error is None:
                message = f"the column {name!r} holds text that is not valid UTF-8"
                samples[offset].error = RowError("invalid_value", message)
        return values, invalid

    id_column = spec.source.id_column
    if id_column is not None:
        values, invalid = usable(id_column)
        for offset, sample in enumerate(samples):
            if offset not in invalid:
                try:
                    sample.own_id = resolve_id(_value(values, offset, id_column), id_column)
                except RowError as error:
                    sample.error = error
    for name in spec.fields:
        values, invalid = usable(name)
        for offset, sample in enumerate(samples):
            try:
                sample.fields[name] = None if offset in invalid else plain_value(_value(values, offset, name))
            except RowError as error:
                sample.error = sample.error or error
    keep: list[pa.Array] = []
    for field in spec.keep:
        values, invalid = usable(field.name)
        if invalid:
            values = values.take(pa.array([None if row in invalid else row for row in range(len(values))], pa.int64()))
        keep.append(values.cast(field.type))
    if spec.source.columns.image is not None:
        images, _ = usable(spec.source.columns.image)
        add_images(spec, samples, lambda offset: images[offset].as_py())
    return Chunk(samples, keep)


def _value(values: pa.Array, offset: int, name: str) -> Any:
    try:
        return values[offset].as_py()
    except (ValueError, OverflowError, ArithmeticError) as error:
        raise RowError("invalid_value", f"the column {name!r} holds a value out of range: {error}") from None


def plain_value(value: Any) -> Any:
    """A column's value as JSON data: dates, decimals and the like as text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """A file without a readable footer gives one row, its error; a footer that has come back gives its rows."""
    footer = _footer(filesystem, storage.join(spec.root, path))
    return 1 if footer is None else min(at_most, footer[0].num_rows)


KIND = Kind("parquet", (".parquet", ".pq"), survey, read, count)
