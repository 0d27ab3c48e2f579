"""Converts rows of Arrow batches to samples: ids, prompt values, kept columns with their types, and media. Folders
`name=value` of a file's path are columns, too (Hive partitions)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pipeline.formats import columns
from pipeline.formats.cells import Cells
from pipeline.formats.kind import Chunk, IdRows, Needs, ReadSpec, Sample, resolve_id
from pipeline.formats.nested import expanded, holders, with_nested
from pipeline.formats.records import add_media, json_of
from pipeline.rows.schemas import RowError
from pipeline.storage import access

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@lru_cache(maxsize=1024)
def partition_values(path: str) -> dict[str, str | None]:
    """Return the partition columns of a path relative to the source root as text; inner folders take precedence."""
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if name and equals:
            values[unquote(name)] = None if value == NULL_PARTITION else unquote(value)
    return values


class DistinctSchemas:
    """Collects the different schemas of files; files in other partition folders count as different."""

    def __init__(self) -> None:
        self.schemas: list[tuple[str, pa.Schema]] = []
        """Each schema with the path of the first file that has it."""
        self._partitions: list[tuple[str, ...]] = []

    def add(self, schema: pa.Schema, path: str) -> bool:
        """Add a file's schema; return whether it is new."""
        partitions = tuple(name for name in partition_values(path) if name not in schema.names)
        for (_, earlier), names in zip(self.schemas, self._partitions, strict=True):
            if names == partitions and schema.equals(earlier):
                return False
        self.schemas.append((path, schema))
        self._partitions.append(partitions)
        return True


class KeptTypes:
    """Checks every file's schema and unifies the types of kept columns over all files."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._checked = DistinctSchemas()
        self._keep: dict[str, pa.Field] = {}

    def add(self, schema: pa.Schema, path: str) -> None:
        """Check one file's schema and unify its types with those of earlier files; ConfigError if a needed column is
        missing, is of an unusable type, or has another type than in earlier files."""
        if not self._checked.add(schema, path):
            return
        for name in partition_values(path):
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        schema = with_nested(schema, self._needs.columns())
        self._needs.require(schema.names, path)
        columns.check(schema, self._needs, path)
        for name in self._needs.keep:
            kept_field = pa.field(name, columns.unpacked(schema.field(name).type))
            self._keep[name] = columns.unify(self._keep[name], kept_field, path) if name in self._keep else kept_field

    @property
    def schema(self) -> pa.Schema:
        """Schema of the kept columns; all are strings if no file could be read."""
        kinds = {name: columns.plain(field.type) for name, field in self._keep.items()}
        return pa.schema([pa.field(name, kinds.get(name, pa.string())) for name in self._needs.keep])


def columns_to_read(spec: ReadSpec, available: Collection[str]) -> list[str]:
    """Return the columns of a file that hold the needed ones."""
    return holders(needed_columns(spec), available)


def needed_columns(spec: ReadSpec) -> list[str]:
    return list(Needs(spec.source, dict.fromkeys(spec.fields, ""), tuple(spec.keep.names)).columns())


def chunks_of(spec: ReadSpec, path: str, batch: pa.RecordBatch, first_index: int) -> Iterator[Chunk]:
    """Convert a batch to chunks of a limited size; needed columns are in the batch or are partition columns of `path`.
    A value that is too large becomes its row's error."""
    names = needed_columns(spec)
    cells = Cells(spec, expanded(batch, names), names)
    for low, high in cells.ranges():
        yield _chunk_of(spec, path, cells, first_index, low, high)


def _chunk_of(spec: ReadSpec, path: str, cells: Cells, first_index: int, low: int, high: int) -> Chunk:
    samples = [Sample(first_index + row) for row in range(low, high)]
    partitions = partition_values(path)

    @cache
    def column(name: str) -> tuple[pa.Array, dict[int, RowError]]:
        if name in cells.names:
            return cells.column(name, low, high)
        return pa.array([partitions[name]] * (high - low), pa.string()), {}

    def note_errors(name: str) -> None:
        for row, error in column(name)[1].items():
            samples[row].error = samples[row].error or error

    if (id_column := spec.source.id_column) is not None:
        values, errors = column(id_column)
        note_errors(id_column)
        for offset, sample in enumerate(samples):
            if offset not in errors:
                try:
                    sample.id_value = resolve_id(_value(values, offset, id_column), id_column)  # typed columns
                except RowError as error:
                    sample.error = error
    for name in spec.fields:
        note_errors(name)
    for offset, sample in enumerate(samples):
        fields: dict[str, Any] = dict.fromkeys(spec.fields)
        for name in spec.fields:
            values, errors = column(name)
            try:
                fields[name] = None if offset in errors else plain_value(_value(values, offset, name))
            except RowError as error:
                sample.error = sample.error or error
        sample.fields = json_of(fields)
    keep: list[pa.Array] = []
    for field in spec.keep:
        values, errors = column(field.name)
        if field.name not in cells.media:
            note_errors(field.name)
        if errors:
            values = values.take(pa.array([None if row in errors else row for row in range(len(values))], pa.int64()))
        keep.append(values.cast(field.type))

    def cell_of(name: str, offset: int) -> Any:
        values, errors = column(name)
        if offset in errors:
            raise errors[offset]
        cell = values[offset]
        is_binary = isinstance(cell, pa.ListScalar) and cell.is_valid and pt.is_integer(cell.type.value_type)
        return cell.values.cast(pa.uint8(), safe=False).to_numpy().tobytes() if is_binary else cell.as_py()

    add_media(spec, samples, cell_of)
    return Chunk(samples, keep)


def lost_chunk(spec: ReadSpec, path: str, rows: range, error: Exception) -> Chunk:
    """Return an error row for every row that cannot be read because of an error."""
    message = f"{path}: rows {rows[0]} to {rows[-1]} cannot be read: {access.reason_of(error)}"
    broken = RowError("broken_shard", message)
    samples = [Sample(row, fields=dict.fromkeys(spec.fields), error=broken) for row in rows]
    return Chunk(samples, [pa.nulls(len(samples), kind) for kind in spec.keep.types])


def id_rows(spec: ReadSpec, path: str, batch: pa.RecordBatch, first_index: int) -> Iterator[tuple[int, IdRows]]:
    """Yield the ids of a batch with the id column, as `chunks_of` makes them, without a sample per row if the column
    has text or integers. Each comes with the index of the row behind its last one."""
    name = spec.source.id_column
    assert name is not None
    cells = Cells(spec, expanded(batch, [name]), [name])
    for low, high in cells.ranges():
        values, errors = cells.column(name, low, high)
        if errors or not (columns.is_text(values.type) or pt.is_integer(values.type)):
            yield first_index + high, IdRows.of(_chunk_of(spec, path, cells, first_index, low, high))
            continue
        ids = values.cast(pa.large_string())
        has_id = pc.fill_null(pc.not_equal(ids, ""), False)
        rows = np.arange(first_index + low, first_index + high)
        yield first_index + high, IdRows(rows[np.asarray(has_id)], ids.filter(has_id))


def _value(values: pa.Array, offset: int, name: str) -> Any:
    try:
        return values[offset].as_py()
    except (ValueError, OverflowError, ArithmeticError) as error:
        raise RowError("invalid_value", f"the column {name!r} holds a value out of range: {error}") from None


def plain_value(value: Any) -> Any:
    """Convert a column's value to JSON data: dates, decimals and other types become text, bytes become hex."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value.hex() if isinstance(value, bytes) else str(value)
