"""The source kind `csv`: the first record names the columns, every other one is a sample; images by URI.

Fields may be quoted and then contain delimiters, doubled quotes and line ends. Plain, gzip or zstd. All values are
text.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from configs.load import ConfigError
from configs.schema import Source
from pipeline.rows.schemas import RowError
from pipeline.sources import lines
from pipeline.sources.kind import Chunk, FilePiece, Kind, Needs, ReadSpec, Survey
from pipeline.sources.lines import Record
from pipeline.sources.records import Row, chunks_of, keep_schema
from pipeline.storage import access

MAX_RECORD_BYTES = 1024 * 1024
"""A quote that is still open after so many bytes is taken for a stray one: its line is an error row, and the next line
begins a new record."""

csv.field_size_limit(MAX_RECORD_BYTES)


def delimiter_of(source: Source, path: str) -> str:
    """What separates fields: as configured, else a tab in `.tsv` files and a comma in others."""
    stem = path.lower()
    for suffix in lines.COMPRESSED:
        stem = stem.removesuffix(suffix)
    return source.delimiter or ("\t" if stem.endswith(".tsv") else ",")


# --- records -------------------------------------------------------------------------------------------------------


def ends_inside(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Whether a quoted field is open at the end of a line; `inside`: whether one was open at its beginning."""
    position = 0
    while True:
        if not inside:
            if line[position : position + 1] != b'"':
                position = line.find(delimiter, position) + 1
                if not position:
                    return False
                continue
            position += 1
        while True:
            position = line.find(b'"', position) + 1
            if not position:
                return True
            if line[position : position + 1] != b'"':
                break
            position += 1
        inside = False
        position = line.find(delimiter, position) + 1
        if not position:
            return False


def split_records(each: Iterable[Record], delimiter: bytes, with_header: bool = False) -> Iterator[Record]:
    """Lines joined while a quoted field continues; the header of a file that is read from its first line has no
    content.

    The content has line feeds only, for any line ends of the file. If joining does not give a record, the first line
    has a stray quote: it is a record of its own, and those behind it are parsed again.
    """
    stream = iter(each)
    waiting: deque[Record] = deque()
    in_header = False
    at_start = True
    while (first := waiting.popleft() if waiting else next(stream, None)) is not None:
        if at_start:
            at_start, in_header = False, first.line == 1 and not with_header
        parts = [first]
        size = first.num_bytes
        inside = first.data is not None and b'"' in first.data and ends_inside(first.data, False, delimiter)
        while inside and size <= MAX_RECORD_BYTES:
            following = waiting.popleft() if waiting else next(stream, None)
            if following is None:
                break
            parts.append(following)
            if following.data is None:
                break
            size += following.num_bytes
            inside = ends_inside(following.data, True, delimiter)
        record = first
        if len(parts) > 1:
            data = b"\n".join(part.data or b"" for part in parts)
            record = Record(first.line, data, size, sum(part.num_lines for part in parts))
            if inside or isinstance(parse(record, delimiter.decode()), RowError):
                waiting.extendleft(reversed(parts[1:]))
                record = first
        if in_header and not lines.is_blank(record):
            in_header = False
            record = record._replace(data=b"")
        yield record


def parse(record: Record, delimiter: str) -> list[str] | RowError:
    """A record's fields; `broken_line` with its line's number where quotes make no sense."""
    text = lines.text_of(record, MAX_RECORD_BYTES)
    if isinstance(text, RowError):
        return text
    try:
        [fields] = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
    except (csv.Error, ValueError) as error:
        return RowError("broken_line", f"line {record.line}: {error}")
    return fields


def _row(record: Record, header: list[str], delimiter: str) -> Row:
    fields = parse(record, delimiter)
    if isinstance(fields, RowError):
        return fields
    if len(fields) != len(header):
        message = f"line {record.line} has {len(fields)} fields, and the header {len(header)}"
        return RowError("broken_line", message)
    return dict(zip(header, fields, strict=True))


# --- files ---------------------------------------------------------------------------------------------------------


def _split(source: Source, path: str) -> lines.Split:
    return partial(split_records, delimiter=delimiter_of(source, path).encode())


def read_header(filesystem: Any, path: str, delimiter: str) -> list[str] | None:
    """The columns' names; None for a file without one record.

    Raises:
        ValueError: the first record is no header.
        OSError, pyarrow.ArrowException: the file cannot be read.
    """
    with lines.open_bytes(filesystem, path) as stream:
        each = lines.split_lines(stream, MAX_RECORD_BYTES)
        for record in split_records(each, delimiter.encode(), with_header=True):
            if not lines.is_blank(record):
                names = parse(record, delimiter)
                if isinstance(names, RowError):
                    raise ValueError(f"the header cannot be read: {names.message}")
                return names
    return None


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Counts and index from reading every file once, columns from every header.

    Raises:
        ConfigError: a needed column is missing in a file or there twice.
    """
    for path in files["path"].to_pylist() if needs.columns() else ():
        try:
            names = read_header(filesystem, access.join(root, path), delimiter_of(needs.source, path))
        except Exception:  # the read task reports the error
            continue
        if names is None:
            continue
        needs.require(names, path)
        for name, dotted in needs.columns().items():
            if names.count(name) > 1:
                raise ConfigError(f"{dotted}: {path} has several columns named {name!r}")

    def split_of(path: str) -> lines.Split:
        return _split(needs.source, path)

    return lines.survey_files(filesystem, root, files, needs.source, split_of, MAX_RECORD_BYTES, keep_schema(needs))


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The piece's rows; one with other fields than the header, or with stray quotes, is a `broken_line` row.

    Raises:
        Exception: the file is damaged or no longer the one that the manifest lists.
    """
    path = access.join(spec.root, piece.path)
    delimiter = delimiter_of(spec.source, piece.path)
    header = read_header(filesystem, path, delimiter) or []
    records = lines.read_records(filesystem, path, piece, _split(spec.source, piece.path), MAX_RECORD_BYTES)
    rows = ((row_index, _row(record, header, delimiter)) for row_index, record in records)
    yield from chunks_of(spec, rows)


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """The rows of a file that could not be indexed."""
    split = _split(spec.source, path)
    return lines.count_records(filesystem, access.join(spec.root, path), split, MAX_RECORD_BYTES, at_most)


KIND = Kind("csv", lines.suffixes(".csv", ".tsv"), survey, read, count)
