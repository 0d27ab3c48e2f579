"""Rows as mappings (JSON objects, CSV records): ids, prompt values, kept text and images of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.sources.cells import add_images, add_videos
from pipeline.sources.kind import Chunk, Needs, ReadSpec, Sample, resolve_id

Row = Mapping[str, Any] | RowError
CHUNK_ROWS = 256
"""Rows whose images are fetched together."""


def keep_schema(needs: Needs) -> pa.Schema:
    """Kept columns of such rows are text, because the files contain no types."""
    return pa.schema([(name, pa.string()) for name in needs.keep])


def kept_text(value: Any) -> str | None:
    """A kept value as text: text as it is, null as null, everything else as JSON."""
    if value is None:
        return None
    return whole_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def chunks_of(spec: ReadSpec, rows: Iterable[tuple[int, Row]]) -> Iterator[Chunk]:
    """(row index, row) as chunks; where `rows` fails, what came before the failure is yielded before it is raised."""
    failure: Exception | None = None

    def until_failure() -> Iterator[tuple[int, Row]]:
        nonlocal failure
        try:
            yield from rows
        except Exception as error:
            failure = error

    sound = until_failure()
    while taken := list(islice(sound, CHUNK_ROWS)):
        yield chunk_of(spec, taken)
    if failure is not None:
        raise failure


def chunk_of(spec: ReadSpec, rows: Iterable[tuple[int, Row]]) -> Chunk:
    """Samples of (row index, row); a row that is an error already stays one."""
    samples: list[Sample] = []
    images: list[Any] = []
    videos: list[Any] = []
    kept: list[list[str | None]] = [[] for _ in spec.keep]
    columns = spec.source.columns
    for row_index, row in rows:
        sample = Sample(row_index)
        values: Mapping[str, Any] = {}
        if isinstance(row, RowError):
            sample.error = row
        else:
            values = row
            _identify(sample, values, spec)
        sample.fields = {name: values.get(name) for name in spec.fields}
        for column, name in zip(kept, spec.keep.names, strict=True):
            column.append(kept_text(values.get(name)))
        samples.append(sample)
        images.append(values.get(columns.image) if columns.image is not None else None)
        videos.append(values.get(columns.video) if columns.video is not None else None)
    if columns.image is not None:
        add_images(spec, samples, images.__getitem__)
    if columns.video is not None:
        add_videos(spec, samples, videos.__getitem__)
    return Chunk(samples, [pa.array(column, pa.string()) for column in kept])


def _identify(sample: Sample, values: Mapping[str, Any], spec: ReadSpec) -> None:
    column = spec.source.id_column
    if column is None:
        return
    try:
        value = values.get(column)
        if isinstance(value, bool | float | list | dict):
            raise RowError("invalid_value", f"the id column {column!r} holds {value!r:.100}; ids are text or integers")
        sample.own_id = whole_text(resolve_id(value, column))
    except RowError as error:
        sample.error = error
