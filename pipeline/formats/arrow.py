"""Reads Arrow IPC files in the streaming format or in the file format around it; local files are memory-mapped."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from pipeline.formats.arrow_messages import Message, read_messages
from pipeline.formats.kind import Chunk, FilePiece, Index, Needs, ReadSpec, SourceKind, Survey, survey_of
from pipeline.formats.limits import MAX_BLOCK_BYTES, max_block, max_expanded, max_rows
from pipeline.formats.tables import DistinctSchemas, chunks_of, columns_to_read
from pipeline.storage import access

FILE_MAGIC = b"ARROW1"
FILE_HEADER_BYTES = 8
BATCH_ROWS = 128


class ArrowFile:
    """A file as its schema and its record batches. Its methods raise ValueError for a damaged file."""

    def __init__(self, file: Any, is_local: bool) -> None:
        self._file, self._size = file, access.size_of(file)
        head = file.read(FILE_HEADER_BYTES)
        self._start = FILE_HEADER_BYTES if head.startswith(FILE_MAGIC) else 0
        if self._start:
            file.seek(self._size - len(FILE_MAGIC))
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                raise ValueError("the file is cut short: its footer is missing")
        self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if is_local else None
        self.schema: pa.Schema = pa.ipc.open_stream(self._stream(self._messages())).schema
        check_names(self.schema)

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield rows and decompressed bytes of every record batch; none is decoded."""
        for message in self._messages(limits_bytes=False):
            if message.num_rows is not None:
                yield message.num_rows, min(message.num_bytes, max_block(sum(map(len, message.parts))))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches, which are not validated."""
        messages = self._messages()
        reader = pa.ipc.open_stream(self._stream(messages))
        if self._data is None:
            yield from reader
            return
        for message in messages:  # checks each message before the reader decodes it
            if message.num_rows is not None:
                yield reader.read_next_batch()

    def _messages(self, limits_bytes: bool = True) -> Iterator[Message]:
        """Yield the messages from the first one on; ValueError if they have too many rows for the size of the file, or
        expand to too many bytes."""
        num_rows = num_bytes = 0
        for message in read_messages(self._take()):
            size = sum(map(len, message.parts))
            num_rows, num_bytes = num_rows + (message.num_rows or 0), num_bytes + message.num_bytes
            if num_rows > max_rows(self._size):
                raise ValueError(f"{num_rows} rows in a file of {self._size} bytes")
            if limits_bytes and message.num_bytes > max_block(size):
                raise ValueError(f"a batch of {size} bytes expands to {message.num_bytes} bytes")
            if limits_bytes and num_bytes > max_expanded(self._size, MAX_BLOCK_BYTES):
                raise ValueError(f"the batches of a file of {self._size} bytes expand to {num_bytes} bytes")
            yield message

    def _take(self) -> Callable[[int], memoryview]:
        """Return a function that returns the next bytes from the first message on."""
        if self._data is None:
            self._file.seek(self._start)
            return lambda size: memoryview(self._file.read(size))
        position = self._start

        def take(size: int) -> memoryview:
            nonlocal position
            assert self._data is not None
            chunk = self._data[position : position + size]
            position += len(chunk)
            return chunk

        return take

    def _stream(self, messages: Iterator[Message]) -> Any:
        """Return what Arrow reads: the mapped bytes, or these messages."""
        if self._data is None:
            return pa.PythonFile(_Served(messages), mode="r")
        return pa.BufferReader(pa.py_buffer(self._data[self._start :]))


class _Served:
    """A file of the bytes of messages."""

    closed = False

    def __init__(self, messages: Iterator[Message]) -> None:
        self._parts = (part for message in messages for part in message.parts)
        self._rest = memoryview(b"")

    def read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            if not self._rest:
                part = next(self._parts, None)
                if part is None:
                    break
                self._rest = part
            size = num_bytes - len(data)
            data += self._rest[:size]
            self._rest = self._rest[size:]
        return bytes(data)

    def close(self) -> None:
        self.closed = True


@contextmanager
def open_arrow(filesystem: Any, path: str) -> Iterator[ArrowFile]:
    """Open a file; raises ValueError for a damaged one."""
    with access.open_file(filesystem, path) as file:
        yield ArrowFile(file, access.is_local(filesystem))


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Read the schema of every file and count the rows of local files."""
    distinct = DistinctSchemas()
    indices: list[Index | None] = []
    for path in files["path"].to_pylist():
        index = Index()
        try:
            with open_arrow(filesystem, access.join(root, path)) as file:
                for num_rows, num_bytes in file.lengths() if access.is_local(filesystem) else ():
                    if num_rows:
                        index.add(num_rows, num_bytes, 0)
        except Exception:  # the read task reports the error
            indices.append(None)
            continue
        distinct.add(file.schema, path)
        indices.append(index if access.is_local(filesystem) else None)
    return survey_of(indices, distinct.schemas)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    position = 0
    with open_arrow(filesystem, access.join(spec.root, piece.path)) as file:
        present = columns_to_read(spec, file.schema.names)
        for batch in file.batches():
            end = position + batch.num_rows
            low, high = max(piece.start, position), end if piece.stop is None else min(piece.stop, end)
            if low < high:
                check_batch(batch)
            for first in range(low, high, BATCH_ROWS):
                part = batch.select(present).slice(first - position, min(BATCH_ROWS, high - first))
                yield from chunks_of(spec, piece.path, part, first)
            position = end
            if piece.stop is not None and position >= piece.stop:
                return
    piece.check_end(position)


def check_names(fields: Iterable[pa.Field]) -> None:
    """Raise UnicodeDecodeError, a ValueError, for a field whose name, or that of a field in it, is not UTF-8."""
    for field in fields:
        kind = field.type
        if field.name is not None and pa.types.is_nested(kind):
            check_names(kind.field(index) for index in range(kind.num_fields))


def check_batch(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid for a batch whose offsets are outside its buffers, because reading it is unsafe; invalid UTF-8
    is accepted here and becomes a row error."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


KIND = SourceKind("arrow", (".arrow",), survey, read)
"""Not in `KINDS`; used by the source kind `hf`."""
