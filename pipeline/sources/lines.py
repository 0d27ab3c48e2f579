"""Files of lines, plain, gzip or zstd: records in order within bounds, and an index so that a span can begin anywhere.

A record is a line, or for CSV several of them. Reading any part again returns the same records: an index entry holds
records, bytes and lines since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import pyarrow as pa

from configs.schema import Source
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import FilePiece, Survey, noting_byte
from pipeline.storage import access

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
"""Suffix to Arrow's name of the codec."""
CHUNK_BYTES = 1024 * 1024
NUM_INDEX_THREADS = 8
MAX_EXPANSION = 200
"""A compressed file that grows to more than this many times its size is taken for a decompression bomb."""
BOM = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One record: its first line's number from 1, its bytes without the line's end (None: more than allowed), and
    how many bytes and lines of the file it takes."""

    line: int
    data: bytes | None
    num_bytes: int
    num_lines: int


Split = Callable[[Iterable[Record]], Iterator[Record]]
"""From lines to records: joins lines that belong together. What is blank stays a record without content (b"")."""


def suffixes(*plain: str) -> tuple[str, ...]:
    """These suffixes, alone and with every compression's behind them."""
    return tuple(stem + tail for stem in plain for tail in ("", *COMPRESSED))


def codec_of(path: str) -> str | None:
    """The codec of a file by its name, None for plain files."""
    return next((codec for suffix, codec in COMPRESSED.items() if path.lower().endswith(suffix)), None)


class _Limited:
    """A decompressed stream that fails where it has grown beyond all measure."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream, self._left = stream, max_bytes

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self._stream.read(num_bytes)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"the file expands to more than {MAX_EXPANSION} times its size")
        return data


@contextmanager
def open_bytes(filesystem: Any, path: str, offset: int = 0) -> Iterator[Any]:
    """A file's content as a stream of bytes, decompressed by its name, from `offset` of the content on."""
    codec = codec_of(path)
    with access.open_file(filesystem, path) as file:
        if codec is None:
            file.seek(offset)
            yield file
            return
        max_bytes = MAX_EXPANSION * max(access.size_of(file), CHUNK_BYTES)
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as plain:
            stream = _Limited(plain, max_bytes)
            while offset:
                passed = len(stream.read(min(offset, CHUNK_BYTES)))
                if not passed:
                    raise ValueError("the file ends before the place where its rows should begin")
                offset -= passed
            with noting_byte(file.tell):
                yield stream


def split_lines(stream: IO[bytes] | Any, max_bytes: int, line: int = 1) -> Iterator[Record]:
    """The lines of a stream, `line` being the first one's number; never holds more than `max_bytes` of one.

    A line ends at a line feed, with or without a carriage return before it. A byte order mark before line 1 is dropped.
    """
    pending: list[bytes] = []
    pending_bytes = held = 0

    def close(tail: bytes, end_bytes: int) -> Record:
        nonlocal pending, pending_bytes, held
        num_bytes = pending_bytes + len(tail)
        data: bytes | None = None
        if held == pending_bytes and num_bytes <= max_bytes + 1:
            data = b"".join([*pending, tail]) if pending else tail
            data = data.removesuffix(b"\r")
            if line == 1:
                data = data.removeprefix(BOM)
            if len(data) > max_bytes:
                data = None
        pending, pending_bytes, held = [], 0, 0
        return Record(line, data, num_bytes + end_bytes, 1)

    while chunk := stream.read(CHUNK_BYTES):
        *whole, rest = chunk.split(b"\n")
        for tail in whole:
            yield close(tail, 1)
            line += 1
        if rest:
            pending_bytes += len(rest)
            if pending_bytes <= max_bytes + 1:
                pending.append(rest)
                held = pending_bytes
            else:
                pending = []
    if pending_bytes:
        yield close(b"", 0)


def each_line(lines: Iterable[Record]) -> Iterator[Record]:
    """The split of kinds whose records are lines."""
    return iter(lines)


def by_lines(path: str) -> Split:
    """The split of any file of such a kind."""
    return each_line


def is_blank(record: Record) -> bool:
    """Whether there is nothing in it but white space: such a record is no sample."""
    return record.data is not None and not record.data.strip()


def text_of(record: Record, max_bytes: int) -> str | RowError:
    """A record as text, or the reason why it is invalid."""
    if record.data is None:
        return RowError("broken_line", f"line {record.line} has more than {max_bytes} bytes")
    try:
        return record.data.decode()
    except UnicodeDecodeError as error:
        return RowError("broken_line", f"line {record.line} is not valid UTF-8: {error.reason}")


# --- the index -----------------------------------------------------------------------------------------------------


@dataclass
class Index:
    """A file's groups of records: samples, bytes and lines of each."""

    rows: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def add(self, rows: int, num_bytes: int, lines: int) -> None:
        """Append a group."""
        self.rows.append(rows)
        self.num_bytes.append(num_bytes)
        self.lines.append(lines)

    @property
    def num_samples(self) -> int:
        """Of the whole file."""
        return sum(self.rows)


def index_records(records: Iterable[Record], max_rows: int, max_bytes: int) -> Index:
    """Groups of at most `max_rows` samples and, but for single ones, `max_bytes`; blank records belong to the next."""
    index = Index()
    rows = size = lines = 0
    for record in records:
        if rows and (rows == max_rows or size + record.num_bytes > max_bytes):
            index.add(rows, size, lines)
            rows = size = lines = 0
        rows += not is_blank(record)
        size += record.num_bytes
        lines += record.num_lines
    if rows or not index.rows:
        index.add(rows, size, lines)
    else:
        index.num_bytes[-1] += size
        index.lines[-1] += lines
    return index


def survey_files(
    filesystem: Any,
    root: str,
    files: pa.Table,
    source: Source,
    split_of: Callable[[str], Split],
    max_bytes: int,
    keep: pa.Schema,
) -> Survey:
    """Index every file by reading it once, several at a time; one that cannot be read has an unknown count."""

    def one(path: str) -> Index | None:
        try:
            with open_bytes(filesystem, access.join(root, path)) as stream:
                records = split_of(path)(split_lines(stream, max_bytes))
                return index_records(records, source.span_max_rows, source.span_max_bytes)
        except Exception:  # damaged, or gone: the read task reports the error
            return None

    with ThreadPoolExecutor(NUM_INDEX_THREADS) as pool:
        return survey_of(list(pool.map(one, files["path"].to_pylist())), keep)


def survey_of(found: list[Index | None], keep: pa.Schema) -> Survey:
    """The survey of files with these indices; None is a file whose count is unknown."""
    integers = pa.list_(pa.int64())
    return Survey(
        pa.array([None if one is None else one.num_samples for one in found], pa.int64()),
        pa.array([[] if one is None else one.rows for one in found], integers),
        pa.array([[] if one is None else one.num_bytes for one in found], integers),
        keep,
        pa.array([[] if one is None else one.lines for one in found], integers),
    )


# --- reading -------------------------------------------------------------------------------------------------------


def read_records(
    filesystem: Any, path: str, piece: FilePiece, split: Split, max_bytes: int
) -> Iterator[tuple[int, Record]]:
    """(row index, record) of the piece's samples.

    Raises:
        ValueError: the file has another size than the manifest lists, or ends too early.
        OSError, pyarrow.ArrowException: it cannot be read or decompressed.
    """
    entry = piece.entry
    with open_bytes(filesystem, path, entry.offset) as stream:
        row_index = entry.row
        for record in split(split_lines(stream, max_bytes, entry.line)):
            if is_blank(record):
                continue
            if piece.stop is not None and row_index >= piece.stop:
                return
            if row_index >= piece.start:
                yield row_index, record
            row_index += 1
    expected = piece.num_samples if piece.stop is None else piece.stop
    if expected is not None and row_index != expected:
        raise ValueError(f"the file ends at row {row_index}, and had {expected} when the job began")


def count_records(filesystem: Any, path: str, split: Split, max_bytes: int, at_most: int) -> int:
    """The samples of a file that could not be indexed; damage counts as the one row that it becomes."""
    found = 0
    try:
        for _ in read_records(filesystem, path, FilePiece(path), split, max_bytes):
            found += 1
            if found >= at_most:
                break
    except Exception:
        return min(at_most, found + 1)
    return found
