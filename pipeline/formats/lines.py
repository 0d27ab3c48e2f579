"""Reads files of lines (plain, gzip or zstd) as size-limited records: one line, or for CSV one or more lines. Indexes
them, so that spans can begin inside; reading any part again returns the same records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from configs.source import SourceConfig
from pipeline.formats.encodings import HEAD_BYTES, LineFeeds, PrefixedStream, Recoded, encoding_of, has_cr_lines
from pipeline.formats.kind import (
    RANGES,
    Chunk,
    Entry,
    FilePiece,
    Index,
    Needs,
    ReadSpec,
    SourceKind,
    Survey,
    SurveyCost,
    noting_byte,
    survey_of,
)
from pipeline.formats.limits import MAX_EXPANSION, TEXT_MAX_BYTES, max_expanded, max_rows
from pipeline.formats.line_ranges import line_ranges
from pipeline.formats.records import Row, chunks_of
from pipeline.rows.schemas import RowError
from pipeline.storage import access

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
"""Maps file suffixes to Arrow codec names."""
CHUNK_BYTES = 1024 * 1024
NUM_INDEX_THREADS = 8
BOM = b"\xef\xbb\xbf"
_TOO_MANY = "the file has more than {} rows, too many for its size"


class Record(NamedTuple):
    """One record: number of its first line (from 1), content (None if too long), bytes and lines in the file."""

    line: int
    data: bytes | None
    num_bytes: int
    num_lines: int
    begin: int | None = None
    """The byte at which a record begins whose line may have further ones."""

    @property
    def name(self) -> str:
        """The record's position, for messages."""
        return f"line {self.line}" if self.begin is None else f"the value at byte {self.begin} (line {self.line})"

    @property
    def is_blank(self) -> bool:
        """Whether the record is only white space; such records are no samples."""
        return self.data is not None and not self.data.strip()

    def text(self, max_bytes: int) -> str:
        """Decode the record; RowError `broken_line` if it is too long or not UTF-8."""
        if self.data is None:
            raise RowError("broken_line", f"{self.name} has more than {max_bytes} bytes")
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise RowError("broken_line", f"{self.name} is not valid UTF-8: {error.reason}") from None


class _Limited:
    """A decompressed stream that raises ValueError after `max_bytes` bytes."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream, self._remaining_bytes = stream, max_bytes

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self._stream.read(num_bytes)
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise ValueError(f"the file expands to more than {MAX_EXPANSION} times its size")
        return data


def codec_of(path: str) -> str | None:
    """Return the Arrow codec name of a compressed file, from its suffix; None for a plain file."""
    return next((codec for suffix, codec in COMPRESSED.items() if path.lower().endswith(suffix)), None)


@contextmanager
def open_bytes(filesystem: Any, path: str, offset: int = 0) -> Iterator[Any]:
    """Open a file as a byte stream of UTF-8 with line feeds (see `encodings`), decompressed by its suffix, from byte
    `offset` of this content."""
    codec = codec_of(path)
    with access.open_file(filesystem, path) as file:
        if codec is None:
            head = file.read(HEAD_BYTES)
            encoding = encoding_of(head)
            if encoding is None:
                file.seek(offset)
                yield LineFeeds(file) if has_cr_lines(head) else file
                return
            file.seek(0)
            with noting_byte(file.tell):
                yield _skipped(_with_line_feeds(Recoded(file, encoding)), offset)
            return
        max_bytes = max_expanded(access.size_of(file), MAX_EXPANSION * CHUNK_BYTES)
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as plain:
            limited = _Limited(plain, max_bytes)
            head = read_head(limited)
            stream, encoding = PrefixedStream(head, limited), encoding_of(head)
            stream = _skipped(_with_line_feeds(stream if encoding is None else Recoded(stream, encoding)), offset)
            with noting_byte(file.tell):
                yield stream


def read_head(stream: Any) -> bytes:
    """Return the first `HEAD_BYTES` of a stream, or all of a shorter one."""
    head = b""
    while len(head) < HEAD_BYTES and (data := stream.read(HEAD_BYTES - len(head))):
        head += data
    return head


def _with_line_feeds(stream: Any) -> Any:
    head = read_head(stream)
    begun = PrefixedStream(head, stream)
    return LineFeeds(begun) if has_cr_lines(head) else begun


def _skipped(stream: Any, num_bytes: int) -> Any:
    """Read and drop the first bytes of a stream; ValueError if it is shorter."""
    while num_bytes:
        num_skipped = len(stream.read(min(num_bytes, CHUNK_BYTES)))
        if not num_skipped:
            raise ValueError("the file ends before the place where its rows should begin")
        num_bytes -= num_skipped
    return stream


def is_recoded(filesystem: Any, path: str) -> bool:
    """Return whether a plain file is of another encoding than UTF-8, so that reading begins at its beginning only."""
    with access.open_file(filesystem, path) as file:
        return encoding_of(file.read(4)) is not None


def split_lines(stream: IO[bytes] | Any, max_bytes: int, line: int = 1, cut: int | None = None) -> Iterator[Record]:
    """Yield the lines of a stream, numbered from `line`; a line of more than `max_bytes` has the content None. A line
    ends at LF or CR LF. A byte order mark before a line is dropped, as of files that `cat` joined. Blank lines may be
    joined to one record, but none before byte `cut` of the stream with one behind it."""
    pending: list[bytes] = []
    num_pending = position = 0

    def close(tail: bytes, end_bytes: int) -> Record:
        nonlocal pending, num_pending
        num_bytes = num_pending + len(tail)
        data: bytes | None = None
        if num_bytes <= max_bytes + 1:
            data = b"".join([*pending, tail]).removesuffix(b"\r")
            data = data.removeprefix(BOM)
            data = data if len(data) <= max_bytes else None
        pending, num_pending = [], 0
        return Record(line, data, num_bytes + end_bytes, 1)

    while chunk := stream.read(CHUNK_BYTES):
        content = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(content == ord("\n"))
        if len(ends):
            yield close(chunk[: ends[0]], 1)
            line += 1
            for start, stop, num_lines in line_ranges(
                content, ends, max_bytes, None if cut is None else cut - position
            ):
                if num_lines == 1:
                    yield close(chunk[start : stop - 1], 1)
                else:
                    blank = chunk[start : stop - 1].replace(b"\r\n", b"\n").removesuffix(b"\r")
                    yield Record(line, blank, stop - start, num_lines)
                line += num_lines
        rest = chunk[ends[-1] + 1 :] if len(ends) else chunk
        num_pending += len(rest)
        pending = [*pending, rest] if num_pending <= max_bytes + 1 else []
        position += len(chunk)
    if num_pending:
        yield close(b"", 0)


def first_line(stream: Any, start: int, stop: int | None) -> int | None:
    """Return the byte at which the first line of the bytes `start` to `stop` (exclusive; None: all) begins, and leave
    the stream there; None if no line begins in them. The stream is at byte `start - 1`, or at 0, and can seek if
    `start` is not 0."""
    if not start:
        return 0
    position = start - 1
    while chunk := stream.read(CHUNK_BYTES):
        newline = chunk.find(b"\n")
        position += len(chunk) if newline < 0 else newline + 1
        if stop is not None and position >= stop:
            return None
        if newline >= 0:
            stream.seek(position)
            return position
    return None


def beginning_before(records: Iterable[Record], position: int, stop: int | None) -> Iterator[Record]:
    """Yield the records that begin before byte `stop` (None: all); the first one begins at `position`."""
    for record in records:
        if stop is not None and position >= stop:
            return
        yield record
        position += record.num_bytes


def index_records(records: Iterable[Record], max_rows: int, max_bytes: int, max_total: int | None = None) -> Index:
    """Group records into at most `max_rows` samples and `max_bytes` bytes (or one larger sample) per group; ValueError
    for more than `max_total` samples."""
    index = Index()
    rows = size = lines = num_total = 0
    for record in records:
        if rows and (rows == max_rows or size + record.num_bytes > max_bytes):
            index.add(rows, size, lines)
            num_total += rows
            rows = size = lines = 0
        rows += not record.is_blank
        if max_total is not None and num_total + rows > max_total:
            raise ValueError(_TOO_MANY.format(max_total))
        size += record.num_bytes
        lines += record.num_lines
    if rows or not index.rows:
        index.add(rows, size, lines)
    else:
        index.num_bytes[-1] += size
        index.lines[-1] += lines
    return index


def most_rows(path: str, size_bytes: int) -> int | None:
    """Return the maximum number of rows of a compressed file; None for a plain file, or one of unknown size."""
    return max_rows(size_bytes) if size_bytes and codec_of(path) is not None else None


class LineFormat(ABC):
    """Base of source kinds of line files; a subclass checks its columns and parses records to rows."""

    name: str
    suffixes: tuple[str, ...]
    other_suffixes: tuple[str, ...] = ()
    max_bytes = TEXT_MAX_BYTES

    has_header = False
    """Whether the first record that is not blank is no sample."""

    def select(self, filesystem: Any, root: str, files: pa.Table, needs: Needs) -> None:
        """Raise ConfigError for a needed column, judged from the listing and the first file with records."""

    def check(self, filesystem: Any, path: str, needs: Needs, name: str) -> None:
        """Raise ConfigError for a column that this file does not have; `name` is the file's name in messages."""

    @abstractmethod
    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        """Return a function that parses a record of this file to a row; it may raise RowError."""

    def dialect(self, filesystem: Any, source: SourceConfig, path: str) -> str:
        """Return how the records of this file are separated, for `split`."""
        return ""

    def split(self, lines: Iterator[Record], dialect: str) -> Iterator[Record]:
        """Yield the records of these lines; by default, one per line."""
        return lines

    def records(self, stream: Any, dialect: str, entry: Entry, cut: int | None = None) -> Iterator[Record]:
        """Yield the records of a stream that begins at `entry`; see `split_lines` for `cut`."""
        return self.split(split_lines(stream, self.max_bytes, entry.line, cut), dialect)

    @property
    def kind(self) -> SourceKind:
        suffixes, others = (
            tuple(stem + tail for stem in stems for tail in ("", *COMPRESSED))
            for stems in (self.suffixes, self.other_suffixes)
        )
        return SourceKind(
            *(self.name, suffixes, self.survey, self.read),
            other_suffixes=others,
            select=self.select,
            cost=SurveyCost.CONTENT,
            can_split=self.splits,
        )

    def splits(self, path: str) -> bool:
        """Return whether ranges of this file can be indexed: reading can begin at any byte of a plain file."""
        return codec_of(path) is None

    def survey(self, filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
        """Check the columns, and index every file or range by reading it once, in `NUM_INDEX_THREADS` threads."""
        source = needs.source
        columns = [files[name].to_pylist() for name in ("path", "size_bytes", *RANGES.names)]

        def index(path: str, size_bytes: int, start: int, stop: int | None) -> Index | None:
            whole_path = access.join(root, path)
            if start == 0:
                self.check(filesystem, whole_path, needs, path)
            try:
                if (start or stop is not None) and is_recoded(filesystem, whole_path):
                    if start:
                        return Index()  # the first range has all rows
                    stop = None
                with open_bytes(filesystem, whole_path, max(0, start - 1)) as stream:
                    if (begin := first_line(stream, start, stop)) is None:
                        return Index()
                    # Lines after the first range are numbered from 2.
                    cut = None if stop is None else stop - begin
                    dialect, entry = self.dialect(filesystem, source, whole_path), Entry(0, begin, 2 if start else 1)
                    records = beginning_before(self.records(stream, dialect, entry, cut), begin, stop)
                    limits = source.span_max_rows, source.span_max_bytes, most_rows(path, size_bytes)
                    file_index = index_records(records, *limits)
                    if self.has_header and not start and stop is not None and not any(file_index.rows):
                        return None  # the header may be in a later range
                    return Index() if start and file_index.lines == [0] else replace(file_index, begin=begin)
            except Exception:  # the read task reports the error
                return None

        with ThreadPoolExecutor(NUM_INDEX_THREADS) as pool:
            return survey_of(list(pool.map(index, *columns)))

    def read(self, filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
        """Read the rows of a piece; a record that cannot be parsed becomes a `broken_line` row."""
        return chunks_of(spec, self._rows(filesystem, spec, piece))

    def _rows(self, filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[tuple[int, Row, int]]:
        path = access.join(spec.root, piece.path)
        parse, max_total = self.parser(filesystem, spec, path), most_rows(path, piece.size_bytes)
        with open_bytes(filesystem, path, piece.entry.offset) as stream:
            row_index, dialect = piece.entry.row, self.dialect(filesystem, spec.source, path)
            for record in self.records(stream, dialect, piece.entry):
                if record.is_blank:
                    continue
                if piece.stop is not None and row_index >= piece.stop:
                    return
                if max_total is not None and row_index >= max_total:
                    raise ValueError(_TOO_MANY.format(max_total))
                if row_index >= piece.start:
                    try:
                        row = parse(record)
                    except RowError as error:
                        row = error
                    yield row_index, row, record.num_bytes
                row_index += 1
        piece.check_end(row_index)
