"""Checks the headers of Parquet pages when their bytes are read, before the pages are decompressed: a few kilobytes may
expand to gigabytes, and the footer may claim less."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from pipeline.formats.limits import MAX_BLOCK_BYTES, MAX_ROWS_PER_BYTE, MAX_SPAN_EXPANSION, max_block, max_rows
from pipeline.storage import access

BATCH_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a batch in the worst case that every row has the largest value of its dictionary."""
LARGE_DICTIONARY_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
_DICTIONARY, _DATA, _DATA_V2 = 2, 0, 3
_DELTA_BYTE_ARRAY = 7
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13
_MAX_DEPTH = 8


class Restart(ValueError):
    """A row group must be read again, with fewer rows at a time or with a column (its path) as dictionary."""

    def __init__(self, max_rows: int | None = None, as_dictionary: str = "") -> None:
        super().__init__("the row group is read in smaller parts")
        self.max_rows, self.as_dictionary = max_rows, as_dictionary


class PageHeader(NamedTuple):
    """Type and sizes of a page; 0 for what its header leaves out."""

    kind: int = 0
    uncompressed: int = 0
    compressed: int = 0
    num_values: int = 0
    encoding: int = 0


class _Cursor:
    """Reads Thrift's compact protocol; IndexError if the bytes end."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data, self.position = data, position

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page header is damaged")

    def integer(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def fields(self) -> Any:
        """Yield identifier and type of the fields of a struct; the caller reads or skips each."""
        identifier = 0
        while (head := self.byte()) & 0x0F != _STOP:
            identifier = identifier + (head >> 4) if head >> 4 else self.integer()
            yield identifier, head & 0x0F

    def integers(self, wanted: dict[int, str]) -> dict[str, int]:
        """Read a struct, and return its integers by name; other fields are skipped."""
        values = {}
        for identifier, kind in self.fields():
            if identifier in wanted and 4 <= kind <= 6:
                values[wanted[identifier]] = self.integer()
            else:
                self.skip(kind)
        return values

    def skip(self, kind: int, depth: int = 0) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("a page header is damaged")
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self.byte()
        elif kind in (4, 5, 6):
            self.varint()
        elif kind in (_DOUBLE, _UUID, _BINARY):
            size = {_DOUBLE: 8, _UUID: 16}.get(kind) or self.varint()
            self.position += size
            if self.position > len(self.data):
                raise IndexError
        elif kind in (_LIST, _SET):
            head = self.byte()
            self.skip_items((head & 0x0F,), head >> 4 if head >> 4 != 15 else self.varint(), depth)
        elif kind == _MAP:
            if count := self.varint():
                kinds = self.byte()
                self.skip_items((kinds >> 4, kinds & 0x0F), count, depth)
        elif kind == _STRUCT:
            for _, part in self.fields():
                self.skip(part, depth + 1)
        else:
            raise ValueError("a page header is damaged")

    def skip_items(self, kinds: tuple[int, ...], count: int, depth: int) -> None:
        for _ in range(count):
            for kind in kinds:
                self.skip(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)


def parse_header(data: memoryview, position: int) -> tuple[PageHeader, int]:
    """Parse the page header at a position; return it and the position behind it. IndexError if the bytes end."""
    cursor, values = _Cursor(data, position), dict[str, int]()
    names = {1: "kind", 2: "uncompressed", 3: "compressed"}
    parts = {5: {1: "num_values", 2: "encoding"}, 7: {1: "num_values", 2: "encoding"}}
    parts[8] = {1: "num_values", 4: "encoding"}
    for identifier, kind in cursor.fields():
        if identifier in names and 4 <= kind <= 6:
            values[names[identifier]] = cursor.integer()
        elif identifier in parts and kind == _STRUCT:
            values |= cursor.integers(parts[identifier])
        else:
            cursor.skip(kind)
    return PageHeader(**values), cursor.position


class ColumnChunk:
    """Checks the pages of a column chunk of `size` bytes from `start` on, of which `max_rows` are decoded at a time.
    `column` is its schema. With `as_dictionary` it is read as dictionary, so that values are not expanded. Pages may
    begin in the `num_behind` bytes behind the chunk."""

    def __init__(
        self, start: int, size: int, column: Any, as_dictionary: bool, max_rows: int, num_behind: int = 0
    ) -> None:
        self._stop, self._last, self._size = start + size, start + size + num_behind, size
        self._path, self._as_dictionary, self.max_rows = column.path, as_dictionary, max_rows
        self._is_bytes = column.physical_type == "BYTE_ARRAY"
        self._is_repeated = column.max_repetition_level > 0
        self._item_bytes = max(1, column.length)
        self._next, self._tail = start, b""
        self._num_items = self._num_bytes = 0
        self._window: deque[tuple[int, int]] = deque()
        """Values and bytes of the pages that one batch may need together."""
        self._window_values = self._window_bytes = 0

    def scan(self, position: int, data: bytes) -> None:
        """Check the headers in bytes that were read from a position; ValueError or Restart."""
        view, base = memoryview(data), position
        if self._tail and position == self._next + len(self._tail):
            view, base = memoryview(self._tail + data), self._next
        while base <= self._next < min(base + len(view), self._last):
            try:
                header, behind = parse_header(view, self._next - base)
            except IndexError:
                self._tail = bytes(view[self._next - base :])
                if len(self._tail) > MAX_HEADER_BYTES:
                    raise ValueError("a page header is too large") from None
                return
            except ValueError:
                if self._next < self._stop:
                    raise
                self._next = self._last  # no page begins behind the chunk
                return
            self._tail = b""
            self._check(header)
            self._next = base + behind + header.compressed

    def _check(self, header: PageHeader) -> None:
        """Check one page; ValueError if it is larger than allowed, Restart if it needs smaller batches."""
        if min(header) < 0:
            raise ValueError("a page header is damaged")
        if header.uncompressed > max_block(header.compressed):
            raise ValueError(f"a page of {header.compressed} bytes expands to {header.uncompressed} bytes")
        if header.kind == _DICTIONARY:
            self._check_dictionary(header)
        elif header.kind in (_DATA, _DATA_V2):
            self._check_data(header)

    def _check_dictionary(self, header: PageHeader) -> None:
        size = max(1, header.uncompressed)
        if header.num_values > size:
            raise ValueError(f"a dictionary of {size} bytes claims {header.num_values} values")
        if not self._is_bytes or self._as_dictionary:
            return
        if self._is_repeated or size > max(LARGE_DICTIONARY_BYTES, MAX_SPAN_EXPANSION * header.compressed):
            raise Restart(as_dictionary=self._path)
        if self.max_rows > max(1, BATCH_BYTES // size):
            raise Restart(max(1, BATCH_BYTES // size))

    def _check_data(self, header: PageHeader) -> None:
        self._num_items += header.num_values
        self._num_bytes += header.uncompressed
        if self._is_repeated:  # one row may have all items
            if self._num_items > max_rows(self._size):
                raise ValueError(f"a column chunk of {self._size} bytes has {self._num_items} list items")
            size = max(self._num_bytes, self._item_bytes * self._num_items)
            if size > max(2 * MAX_BLOCK_BYTES, MAX_ROWS_PER_BYTE * self._size):
                raise ValueError(f"a column chunk of {self._size} bytes expands to {size} bytes")
        if self.max_rows == 1 or not self._is_bytes:
            return
        num_copies = min(self.max_rows, max(1, header.num_values)) if header.encoding == _DELTA_BYTE_ARRAY else 1
        self._window.append((header.num_values, header.uncompressed * num_copies))
        self._window_values += header.num_values
        self._window_bytes += header.uncompressed * num_copies
        while not self._is_repeated and self._window_values - self._window[0][0] >= self.max_rows:
            values, size = self._window.popleft()
            self._window_values, self._window_bytes = self._window_values - values, self._window_bytes - size
        if self._window_bytes > MAX_BLOCK_BYTES:
            raise Restart(1)


class CheckedFile:
    """A file of which pyarrow reads column chunks; `watched` are those whose pages are checked. An error of a check or
    of the file is kept in `error`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = access.size_of(file)
        self._position: int = file.tell()
        self.watched: list[ColumnChunk] = []
        self.error: Exception | None = None
        self.is_readable = True
        """Whether the file itself could be read."""

    def read(self, num_bytes: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(num_bytes)
        except Exception:
            self.is_readable = False
            raise
        try:
            for chunk in self.watched:
                chunk.scan(self._position, data)
        except Exception as error:
            self.error = error
            raise
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        position: int = self._file.seek(offset, whence)
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: the file is not written."""

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()
