"""The source kind `jsonl`: one line is one JSON object and one sample; images by URI. Plain, gzip or zstd.

Blank lines are skipped. Kept columns are text, because the files contain no types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipeline.rows.schemas import RowError
from pipeline.sources import lines
from pipeline.sources.kind import TEXT_MAX_BYTES, Chunk, FilePiece, Kind, Needs, ReadSpec, Survey
from pipeline.sources.records import Row, chunks_of, keep_schema
from pipeline.storage import access

NUM_PEEKED_ROWS = 100
"""Number of rows that are read to find the columns of a source."""


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Counts and index from reading every file once; which columns exist is judged by the first file's first rows.

    Raises:
        ConfigError: a needed column is in none of those rows.
    """
    if needs.columns():
        for path in files["path"].to_pylist():
            names = _peek(filesystem, access.join(root, path))
            if names:
                needs.require(names, f"the first {NUM_PEEKED_ROWS} rows of {path}")
                break
    return lines.survey_files(filesystem, root, files, needs.source, lines.by_lines, TEXT_MAX_BYTES, keep_schema(needs))


def _peek(filesystem: Any, path: str) -> set[str]:
    """The columns of the first rows; empty when not one of them is an object."""
    names: set[str] = set()
    try:
        records = lines.read_records(filesystem, path, FilePiece(path), lines.each_line, TEXT_MAX_BYTES)
        for (_, record), _ in zip(records, range(NUM_PEEKED_ROWS), strict=False):
            row = parse(record)
            names |= set() if isinstance(row, RowError) else set(row)
    except Exception:  # the read task reports the error
        return names
    return names


def parse(record: lines.Record) -> Row:
    """A line as an object; `broken_line` with its number for anything else."""
    text = lines.text_of(record, TEXT_MAX_BYTES)
    if isinstance(text, RowError):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError("broken_line", f"line {record.line} is no JSON: {error}")
    if not isinstance(value, dict):
        return RowError(
            "broken_line", f"line {record.line} is no JSON object but {_NAMES.get(type(value), 'a number')}"
        )
    return value


_NAMES = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The piece's rows; a line that is no JSON object is a `broken_line` row.

    Raises:
        Exception: the file is damaged or no longer the one that the manifest lists.
    """
    path = access.join(spec.root, piece.path)
    records = lines.read_records(filesystem, path, piece, lines.each_line, TEXT_MAX_BYTES)
    yield from chunks_of(spec, ((row_index, parse(record)) for row_index, record in records))


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """The lines of a file that could not be indexed."""
    return lines.count_records(filesystem, access.join(spec.root, path), lines.each_line, TEXT_MAX_BYTES, at_most)


KIND = Kind("jsonl", lines.suffixes(".jsonl", ".ndjson"), survey, read, count)
