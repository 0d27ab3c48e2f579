"""The source kind `text`: one line is one prompt, in the field `text`; blank lines are skipped. Plain, gzip or zstd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipeline.rows.schemas import RowError
from pipeline.sources import lines
from pipeline.sources.kind import TEXT_MAX_BYTES, Chunk, FilePiece, Kind, Needs, ReadSpec, Survey
from pipeline.sources.records import Row, chunks_of, keep_schema
from pipeline.storage import access

FIELD = "text"


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Counts and index from reading every file once.

    Raises:
        ConfigError: a column other than `text` is asked for.
    """
    needs.require([FIELD], "a file of lines")
    return lines.survey_files(filesystem, root, files, needs.source, lines.by_lines, TEXT_MAX_BYTES, keep_schema(needs))


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The piece's lines; one that is too long or no UTF-8 is a `broken_line` row.

    Raises:
        Exception: the file is damaged or no longer the one that the manifest lists.
    """
    path = access.join(spec.root, piece.path)
    records = lines.read_records(filesystem, path, piece, lines.each_line, TEXT_MAX_BYTES)
    yield from chunks_of(spec, ((row_index, _row(record)) for row_index, record in records))


def _row(record: lines.Record) -> Row:
    text = lines.text_of(record, TEXT_MAX_BYTES)
    return text if isinstance(text, RowError) else {FIELD: text}


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """The lines of a file that could not be indexed."""
    return lines.count_records(filesystem, access.join(spec.root, path), lines.each_line, TEXT_MAX_BYTES, at_most)


KIND = Kind("text", lines.suffixes(".txt", ".text", ".prompts"), survey, read, count)
