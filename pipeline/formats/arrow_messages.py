"""Checks messages of Arrow IPC before they are decoded: sizes, rows, and the size of compressed buffers after
decompression, all of which Arrow trusts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_CONTINUES = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_NOT_COMPRESSED = -1
"""The size before a buffer that was stored as it is."""


@dataclass(frozen=True)
class Message:
    """One message: its bytes in parts, the rows of a record batch (None: it is none), and the decompressed bytes of its
    buffers."""

    parts: tuple[memoryview, ...]
    num_rows: int | None
    num_bytes: int


def read_messages(take: Callable[[int], memoryview]) -> Iterator[Message]:
    """Yield the messages of a stream; `take` returns the next bytes, or fewer at the end. ValueError for a message that
    is cut short or damaged."""
    while True:
        head = take(4)
        if bytes(head) == _CONTINUES:
            head = memoryview(bytes(head) + bytes(take(4)))
        if not head:
            return
        if len(head) not in (4, 8):
            raise ValueError("the file ends inside a message")
        size = int.from_bytes(head[-4:], "little", signed=True)
        if size <= 0:
            return
        metadata = _exactly(take, size)
        try:
            table = _Table.root(metadata)
            body_size = table.number(3, "<q")
            if body_size < 0:
                raise ValueError("a message has a negative size")
            body = _exactly(take, body_size)
            num_rows, num_bytes = _check(table, body)
        except (struct.error, IndexError):
            raise ValueError("a message is damaged") from None
        yield Message((head, metadata, body), num_rows, num_bytes)


def _exactly(take: Callable[[int], memoryview], size: int) -> memoryview:
    data = take(size)
    if len(data) < size:
        raise ValueError("the file ends inside a message")
    return data


def _check(message: _Table, body: memoryview) -> tuple[int | None, int]:
    """Return the rows of a record batch (None for other messages) and the decompressed bytes of its buffers."""
    kind = message.number(1, "<B")
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return None, 0
    batch = message.table(2)
    if kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    num_rows = batch.number(0, "<q")
    if num_rows < 0:
        raise ValueError(f"a batch has {num_rows} rows")
    first_rows, _ = next(batch.structs(1, "<qq"), (num_rows, 0))
    if kind == _RECORD_BATCH and first_rows != num_rows:
        raise ValueError(f"a batch has {num_rows} rows, and its first column {first_rows}")
    num_bytes = len(body)
    if batch.has(3):
        num_bytes = sum(_decompressed(body, *buffer) for buffer in batch.structs(2, "<qq"))
    return num_rows if kind == _RECORD_BATCH else None, num_bytes


def _decompressed(body: memoryview, offset: int, length: int) -> int:
    """Return the decompressed size of a buffer, which begins with it."""
    if length < 8:
        return 0
    if offset < 0:
        raise IndexError
    size = struct.unpack_from("<q", body, offset)[0]
    return length - 8 if size == _NOT_COMPRESSED else max(0, int(size))


class _Table:
    """A table of a flatbuffer; struct.error or IndexError for a position outside of it."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - self._read("<i", position)
        self._size = self._read("<H", self._fields)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        return self._position_of(field) is not None

    def number(self, field: int, form: str) -> int:
        position = self._position_of(field)
        return 0 if position is None else self._read(form, position)

    def table(self, field: int) -> _Table:
        return _Table(self._data, self._target(field))

    def structs(self, field: int, form: str) -> Iterator[tuple[Any, ...]]:
        """Yield the structs of a vector."""
        if self._position_of(field) is None:
            return
        start = self._target(field)
        count, size = self._read("<I", start), struct.calcsize(form)
        if start + 4 + count * size > len(self._data):
            raise IndexError
        yield from struct.iter_unpack(form, self._data[start + 4 : start + 4 + count * size])

    def _position_of(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = self._read("<H", self._fields + entry) if entry < self._size else 0
        return self._position + offset if offset else None

    def _target(self, field: int) -> int:
        position = self._position_of(field)
        if position is None:
            raise IndexError
        return position + self._read("<I", position)

    def _read(self, form: str, position: int) -> int:
        if position < 0:
            raise IndexError
        return int(struct.unpack_from(form, self._data, position)[0])
