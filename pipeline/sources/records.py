"""Converts rows that are mappings (JSON objects, CSV records) to samples: ids, prompt values, kept text and media."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.sources.cells import add_media
from pipeline.sources.kind import Chunk, Needs, ReadSpec, Sample, resolve_id

Row = Mapping[str, Any] | RowError
CHUNK_ROWS = 256


def keep_schema(needs: Needs) -> pa.Schema:
    """Return the schema of kept columns: all are strings, because the files contain no types."""
    return pa.schema([(name, pa.string()) for name in needs.keep])


def kept_text(value: Any) -> str | None:
    """Convert a kept value to text: strings and null unchanged, other values as JSON."""
    if value is None:
        return None
    return whole_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def kept_arrays(spec: ReadSpec, rows: Iterable[Mapping[str, Any]]) -> list[pa.Array]:
    """Build one string array per kept column of these rows."""
    rows = list(rows)
    return [pa.array([kept_text(row.get(name)) for row in rows], pa.string()) for name in spec.keep.names]


def chunks_of(spec: ReadSpec, rows: Iterable[tuple[int, Row]]) -> Iterator[Chunk]:
    """Group (row index, row) into chunks; if `rows` raises, the rows before are yielded first."""
    pending: list[tuple[int, Row]] = []
    try:
        for row in rows:
            pending.append(row)
            if len(pending) == CHUNK_ROWS:
                yield _chunk_of(spec, pending)
                pending = []
    except Exception:
        yield _chunk_of(spec, pending)
        raise
    yield _chunk_of(spec, pending)


def _chunk_of(spec: ReadSpec, rows: list[tuple[int, Row]]) -> Chunk:
    samples, values = [], []
    for row_index, row in rows:
        sample, mapping = Sample(row_index), {} if isinstance(row, RowError) else row
        try:
            if isinstance(row, RowError):
                raise row
            sample.id_value = _id_of(row, spec.source.id_column)
        except RowError as error:
            sample.error = error
        sample.fields = {name: mapping.get(name) for name in spec.fields}
        samples.append(sample)
        values.append(mapping)
    add_media(spec, samples, lambda column, offset: values[offset].get(column))
    return Chunk(samples, kept_arrays(spec, values))


def _id_of(row: Mapping[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    value = row.get(column)
    if isinstance(value, bool | float | list | dict):
        raise RowError("invalid_value", f"the id column {column!r} holds {value!r:.100}; ids are text or integers")
    return whole_text(resolve_id(value, column))
