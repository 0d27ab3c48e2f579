"""Reads the source kind `csv`: the first record names the columns, every further record is a sample; media by URI.

Quoted fields may contain delimiters, doubled quotes and line ends. Files are plain, gzip or zstd. All values are text.
A quote before a byte decides whether the line end there ends a record, so ranges of a file are indexed as if a record
began at their first line, and again from the end of the record before if that was wrong.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.formats.kind import Needs, ReadSpec
from pipeline.formats.lines import COMPRESSED, LineFormat, Record, open_bytes, split_lines
from pipeline.formats.records import Row
from pipeline.formats.tables import needed_columns
from pipeline.rows.schemas import RowError


def delimiter_of(source: SourceConfig, path: str) -> str:
    """Return the field separator: `source.delimiter`, or by default a tab in `.tsv` files and a comma in others."""
    stem = path.lower()
    for suffix in COMPRESSED:
        stem = stem.removesuffix(suffix)
    return source.delimiter or ("\t" if stem.endswith(".tsv") else ",")


@lru_cache(maxsize=8)
def _whole(delimiter: bytes) -> re.Pattern[bytes]:
    """Return the pattern of lines of fields of which none is open at the end; quotes inside plain fields are text."""
    delimiter = re.escape(delimiter)
    rest = rb"(?:(?!%s)[\s\S])*+" % delimiter
    field = rb'(?:"[^"]*+(?:""[^"]*+)*+"%s|(?!")%s)' % (rest, rest)
    return re.compile(rb"%s(?:%s%s)*+" % (field, delimiter, field))


def ends_inside(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Return whether a quoted field is open at the end of a line; `inside` is the same for the start of the line."""
    return not _whole(delimiter).fullmatch(b'"' + line if inside else line)


def _may_open(record: Record) -> bool:
    return record.data is not None and b'"' in record.data


class Csv(LineFormat):
    """Parses records of delimited fields."""

    name = "csv"
    suffixes = (".csv", ".tsv")
    has_header = True
    max_bytes = 1024 * 1024
    """A quote that is still open after this many bytes counts as stray: its line is an error row, and the next line
    begins a new record."""

    def split(self, lines: Iterator[Record], source: SourceConfig, path: str) -> Iterator[Record]:
        """Yield the records; the header, if the lines begin with line 1, becomes a blank record."""
        in_header: bool | None = None
        for record in self.join(lines, delimiter_of(source, path)):
            in_header = record.line == 1 if in_header is None else in_header
            if in_header and not record.is_blank:
                in_header = False
                record = record._replace(data=b"")
            yield record

    def join(self, lines: Iterable[Record], delimiter: str) -> Iterator[Record]:
        """Join lines with line feeds to a record while a quoted field is open. If the joined lines are no valid record,
        the first line has a stray quote: it becomes a record of its own, and the following lines are parsed again.

        Every line is examined once as a first line, and once as a line that begins inside a field."""
        stream, waiting = iter(lines), deque[Record]()
        # The first `num_open` of the waiting lines, of `open_bytes`, leave a field open that is open before them. The
        # next one, if it is there, does not, or is no line of a valid record, in which case `is_end` is false.
        num_open = open_bytes = 0
        is_end = False
        while (first := waiting.popleft() if waiting else next(stream, None)) is not None:
            if num_open:
                num_open, open_bytes = num_open - 1, open_bytes - first.num_bytes
            is_valid, is_open = self.examine(first, False, delimiter) if _may_open(first) else (False, False)
            size = first.num_bytes + open_bytes
            while is_valid and is_open and len(waiting) == num_open and size <= self.max_bytes:
                following = next(stream, None)
                if following is None:
                    break
                waiting.append(following)
                continues, stays_open = self.examine(following, True, delimiter)
                is_end = continues and not stays_open
                if continues and stays_open:
                    num_open, open_bytes = num_open + 1, open_bytes + following.num_bytes
                    size += following.num_bytes
            if is_valid and is_open and is_end and len(waiting) > num_open:
                size += waiting[-1].num_bytes
                if size <= self.max_bytes:
                    parts = [first, *waiting]
                    data = b"\n".join(part.data or b"" for part in parts)
                    first = Record(first.line, data, size, sum(part.num_lines for part in parts))
                    waiting.clear()
                    num_open = open_bytes = 0
            yield first

    def examine(self, record: Record, inside: bool, delimiter: str) -> tuple[bool, bool]:
        """Return whether a line can be part of a valid record, and whether a quoted field is open at its end; if
        `inside`, one is open at its start."""
        if record.data is None:
            return False, False
        is_open = ends_inside(record.data, inside, delimiter.encode())
        quoted = b'"' * inside + record.data + b'"' * is_open
        try:
            self.fields(record._replace(data=quoted), delimiter)
        except RowError:
            return False, is_open
        return True, is_open

    def fields(self, record: Record, delimiter: str) -> list[str]:
        """Parse a record to fields; RowError `broken_line` with the line number if its quotes are invalid."""
        text = record.text(self.max_bytes)
        try:
            [fields] = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
        except (csv.Error, ValueError) as error:
            raise RowError("broken_line", f"line {record.line}: {error}") from None
        return fields

    def header(self, filesystem: Any, path: str, delimiter: str) -> list[str]:
        """Read the column names; empty for a file without records, ValueError if the first record cannot be parsed."""
        with open_bytes(filesystem, path) as stream:
            for record in self.join(split_lines(stream, self.max_bytes), delimiter):
                if not record.is_blank:
                    try:
                        return self.fields(record, delimiter)
                    except RowError as error:
                        raise ValueError(f"the header cannot be read: {error.message}") from None
        return []

    def check(self, filesystem: Any, path: str, needs: Needs, name: str) -> None:
        """Raise ConfigError if the header lacks a needed column or repeats its name."""
        if not needs.columns():
            return
        try:
            names = self.header(filesystem, path, delimiter_of(needs.source, path))
        except Exception:  # the read task reports the error
            return
        if not names:
            return
        needs.require(names, name)
        for column, dotted in needs.columns().items():
            if names.count(column) > 1:
                raise ConfigError(f"{dotted}: {name} has several columns named {column!r}")

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        delimiter = delimiter_of(spec.source, path)
        header = self.header(filesystem, path, delimiter)
        needed = set(needed_columns(spec))
        indices = {name: index for index, name in enumerate(header) if name in needed}

        def parse(record: Record) -> Row:
            fields = self.fields(record, delimiter)
            if len(fields) != len(header):
                message = f"line {record.line} has {len(fields)} fields, and the header {len(header)}"
                raise RowError("broken_line", message)
            return {name: fields[index] for name, index in indices.items()}

        return parse


csv.field_size_limit(Csv.max_bytes)
KIND = Csv().kind
