"""Converts rows of Arrow batches to samples: ids, prompt values, kept columns with their types, and media. Folders
`name=value` of a file's path are columns, too (Hive partitions)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pipeline.rows.schemas import RowError
from pipeline.sources import columns
from pipeline.sources.kind import Chunk, IdRows, Needs, ReadSpec, Sample, resolve_id
from pipeline.sources.records import add_media

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
        self.found: list[tuple[str, pa.Schema]] = []
        """Each schema with the path of the first file that has it."""
        self._partitions: list[tuple[str, ...]] = []

    def add(self, schema: pa.Schema, path: str) -> bool:
        """Add a file's schema; return whether it is new."""
        partitions = tuple(name for name in partition_values(path) if name not in schema.names)
        for (_, earlier), names in zip(self.found, self._partitions, strict=True):
            if names == partitions and schema.equals(earlier):
                return False
        self.found.append((path, schema))
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


def needed_columns(spec: ReadSpec) -> list[str]:
    return list(Needs(spec.source, dict.fromkeys(spec.fields, ""), tuple(spec.keep.names)).columns())


def chunk_of(spec: ReadSpec, path: str, batch: pa.RecordBatch, first_index: int) -> Chunk:
    """Convert a batch to a chunk; needed columns are in the batch or are partition columns of `path`."""
    samples = [Sample(first_index + offset) for offset in range(batch.num_rows)]
    partitions = partition_values(path)

    def usable(name: str) -> tuple[pa.Array, set[int]]:
        """Return a column and the rows with invalid text; these rows get an error."""
        index = batch.schema.get_field_index(name)
        if index < 0:
            return pa.array([partitions[name]] * batch.num_rows, pa.string()), set()
        values: pa.Array = batch.column(index)
        values = columns.plain_values(values.dictionary_decode() if pt.is_dictionary(values.type) else values)
        invalid = invalid_rows(values)
        for offset in invalid:
            message = f"the column {name!r} holds text that is not valid UTF-8"
            samples[offset].error = samples[offset].error or RowError("invalid_value", message)
        return values, invalid

    if (id_column := spec.source.id_column) is not None:
        values, invalid = usable(id_column)
        for offset, sample in enumerate(samples):
            if offset not in invalid:
                try:
                    sample.id_value = resolve_id(_value(values, offset, id_column), id_column)
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
    media = {name: usable(name)[0] for name in (spec.source.columns.image, spec.source.columns.video) if name}
    add_media(spec, samples, lambda name, offset: media[name][offset].as_py())
    return Chunk(samples, keep)


def id_rows(spec: ReadSpec, path: str, batch: pa.RecordBatch, first_index: int) -> IdRows:
    """Return the ids of a batch with the id column, equal to those that `chunk_of` makes, without a sample per row if
    the column holds text or integers."""
    values: pa.Array = batch.column(0)
    values = columns.plain_values(values.dictionary_decode() if pt.is_dictionary(values.type) else values)
    if not (columns.is_text(values.type) or pt.is_integer(values.type)) or invalid_rows(values):
        return IdRows.of(chunk_of(spec, path, batch, first_index))
    ids = values.cast(pa.large_string())
    has_id = pc.fill_null(pc.not_equal(ids, ""), False)
    rows = np.arange(first_index, first_index + batch.num_rows)
    return IdRows(rows[np.asarray(has_id)], ids.filter(has_id))


def invalid_rows(values: pa.Array) -> set[int]:
    """Return the rows whose values fail Arrow's validation, in practice text that is not UTF-8."""

    def is_valid(part: pa.Array) -> bool:
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            return False
        return True

    if is_valid(values):
        return set()
    # A slice shares the buffers of its parent, so only a copy is validated row by row.
    rows = ((index, values.slice(index, 1)) for index in range(len(values)))
    return {index for index, row in rows if not is_valid(pa.concat_arrays([row, row.slice(0, 0)]))}


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
