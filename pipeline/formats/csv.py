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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.formats.kind import Needs, ReadSpec
from pipeline.formats.lines import COMPRESSED, LineFormat, Record, open_bytes, split_lines
from pipeline.formats.nested import holders
from pipeline.formats.records import Row
from pipeline.formats.tables import needed_columns
from pipeline.rows.schemas import RowError

CANDIDATES = (",", ";", "\t", "|")
NUM_SAMPLED = 20
"""Number of records, header included, from which the field separator is known."""
MAX_SAMPLED_BYTES = 4 * 1024 * 1024
INDEX = "index"
"""The column by which rows of VLMEvalKit's files refer to each other."""
MAX_QUOTED_BYTES = 1024 * 1024
MAX_INDEX_CHARS = 20
MAX_INDEXED = 4_000_000
"""Maximum number of rows of a file that others can refer to."""
_SEPARATOR_LINE = re.compile(rb'"?sep=([^"\r\n])"?', re.IGNORECASE)


def separator_of(line: bytes) -> str | None:
    """Return the separator that Excel's line `sep=;` before the header names; None for another line."""
    match = _SEPARATOR_LINE.fullmatch(line.strip(b" \r"))
    return match.group(1).decode("latin-1") if match else None


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

    @property
    def max_quoted_bytes(self) -> int:
        """A quote that is still open after this many bytes counts as stray: its line is an error row, and the next line
        begins a new record."""
        return min(MAX_QUOTED_BYTES, self.max_bytes)

    def dialect(self, filesystem: Any, source: SourceConfig, path: str) -> str:
        """Return the field separator of a file (`source.delimiter`). Without one in the configuration or in a line
        `sep=`, it is the suffix's, unless it is not in every of the first records as often as in the header and
        another one is."""
        stem = path.lower()
        for suffix in COMPRESSED:
            stem = stem.removesuffix(suffix)
        by_suffix = "\t" if stem.endswith(".tsv") else ","
        if source.delimiter != "auto":
            return source.delimiter or by_suffix
        lines: list[Record] = []
        with suppress(Exception), open_bytes(filesystem, path) as stream:  # the read task reports the error
            num_bytes = 0
            for line in split_lines(stream, self.max_bytes):
                num_bytes += line.num_bytes
                if not line.is_blank:
                    lines.append(line)
                if len(lines) > NUM_SAMPLED or num_bytes > MAX_SAMPLED_BYTES:
                    break
        if lines and lines[0].data is not None and (named := separator_of(lines[0].data)):
            return named
        widths = {candidate: self._width(lines, candidate) for candidate in CANDIDATES}
        widest = max(CANDIDATES, key=lambda candidate: widths[candidate])
        return widest if widths[by_suffix] <= 1 < widths[widest] else by_suffix

    def _width(self, lines: Sequence[Record], delimiter: str) -> int:
        """Return the number of fields of these records; 0 if it differs among them, or they cannot be parsed."""
        widths = set()
        records = list(islice(self.join(lines, delimiter), NUM_SAMPLED))
        for record in records[:-1] if len(records) > 2 else records:  # the last one may continue behind the sample
            try:
                widths.add(len(self.fields(record, delimiter)))
            except RowError:
                return 0
        return widths.pop() if len(widths) == 1 else 0

    def split(self, lines: Iterator[Record], dialect: str) -> Iterator[Record]:
        """Yield the records; a line `sep=` and the header, if the lines begin with line 1, become blank records."""
        in_header: bool | None = None
        for record in self.join(lines, dialect):
            in_header = record.line == 1 if in_header is None else in_header
            if in_header and not record.is_blank:
                in_header = record.line == 1 and separator_of(record.data or b"") is not None
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
            while is_valid and is_open and len(waiting) == num_open and size <= self.max_quoted_bytes:
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
                if size <= self.max_quoted_bytes:
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
                is_separator = record.line == 1 and separator_of(record.data or b"") is not None
                if not record.is_blank and not is_separator:
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
            names = self.header(filesystem, path, self.dialect(filesystem, needs.source, path))
        except Exception:  # the read task reports the error
            return
        if not names:
            return
        names = _stripped(names, needs.columns())
        needs.require([*names, *(column for column in needs.columns() if holders([column], names))], name)
        for column, dotted in needs.columns().items():
            if names.count(column) > 1:
                raise ConfigError(f"{dotted}: {name} has several columns named {column!r}")

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        delimiter = self.dialect(filesystem, spec.source, path)
        names = needed_columns(spec)
        header = _stripped(self.header(filesystem, path, delimiter), names)
        needed = set(holders(names, header))
        indices = {name: index for index, name in enumerate(header) if name in needed}

        def parse(record: Record) -> Row:
            fields = self.fields(record, delimiter)
            if len(fields) != len(header):
                message = f"line {record.line} has {len(fields)} fields, and the header {len(header)}"
                raise RowError("broken_line", message)
            row = {name: fields[index] for name, index in indices.items()}
            if images is not None and (image := images.of(row[images.name])) is not None:
                row[images.name] = image
            return row

        images, column = None, spec.source.columns.image
        if column in header and INDEX in header:
            images = _Images(self, filesystem, path, delimiter, header, column)
        return parse


class _Images:
    """The images of a file in VLMEvalKit's format: an image is base64, or the `index` of an earlier row that has it.
    The positions of these rows are read when the first row refers to one."""

    def __init__(self, form: Csv, filesystem: Any, path: str, delimiter: str, header: Sequence[str], name: str) -> None:
        self._form, self._filesystem, self._path = form, filesystem, path
        self._delimiter, self._columns = delimiter, (header.index(INDEX), header.index(name))
        self.name = name
        self._offsets: dict[str, tuple[int, int]] | None = None
        self._last = ("", "")

    def of(self, cell: str) -> str | None:
        """Return the image that a cell refers to; None if it is no index of a row with an image."""
        index = cell.strip()
        if len(index) > MAX_INDEX_CHARS or not index.isdigit():
            return None
        if self._offsets is None:
            self._offsets = dict(islice(self._positions(), MAX_INDEXED))
        if self._last[0] != index:
            if (position := self._offsets.get(index)) is None:
                return None
            [(_, image, _, _)] = islice(self._rows(*position), 1)
            self._last = (index, image)
        return self._last[1]

    def _positions(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for index, image, offset, line in self._rows(0, 1):
            if len(image) > MAX_INDEX_CHARS:
                yield index.strip(), (offset, line)

    def _rows(self, offset: int, line: int) -> Iterator[tuple[str, str, int, int]]:
        """Yield index, image, byte and line of every row from this byte and line on."""
        with open_bytes(self._filesystem, self._path, offset) as stream:
            for record in self._form.split(split_lines(stream, self._form.max_bytes, line), self._delimiter):
                with suppress(RowError, IndexError):  # the row itself reports the error
                    if not record.is_blank:
                        fields = self._form.fields(record, self._delimiter)
                        yield fields[self._columns[0]], fields[self._columns[1]], offset, record.line
                offset += record.num_bytes


def _stripped(header: Sequence[str], needed: Collection[str]) -> list[str]:
    """Return the column names without white space around them, unless the job needs a column of the whole name."""
    return [name if name in needed else name.strip() for name in header]


csv.field_size_limit(Csv.max_bytes)
KIND = Csv().kind
