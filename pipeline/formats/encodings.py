"""Reads text files of other systems as UTF-8 with line feeds: UTF-16 and UTF-32 by their byte order mark, and lines
that end with CR alone."""

from __future__ import annotations

import codecs
from typing import Any

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""
HEAD_BYTES = 64 * 1024
"""Bytes at the beginning of a file from which the ends of its lines are known."""


def encoding_of(head: bytes) -> str | None:
    """Return the name of a file's encoding by its byte order mark; None for UTF-8."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), None)


def has_cr_lines(head: bytes) -> bool:
    """Return whether lines end with CR alone: there is one, and no LF, in the first `HEAD_BYTES` of UTF-8."""
    return b"\r" in head and b"\n" not in head


class Recoded:
    """A stream of an encoding as a stream of UTF-8. Its bytes are those of a byte order mark and the text; text that is
    invalid in the encoding is invalid in UTF-8 too."""

    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._rest = b""
        self._is_at_end = False

    def read(self, num_bytes: int) -> bytes:
        while len(self._rest) < num_bytes and not self._is_at_end:
            data = self._stream.read(num_bytes)
            self._is_at_end = not data
            self._rest += self._decoder.decode(data, final=not data).encode("utf-8", "surrogatepass")
        data, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return data


class LineFeeds:
    """A stream in which every CR is read as a line feed; positions are unchanged."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self._stream.read(num_bytes)
        return data.replace(b"\r", b"\n")

    def seek(self, offset: int) -> int:
        return int(self._stream.seek(offset))


class PrefixedStream:
    """A stream whose first bytes, `head`, have been read already."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = head, stream

    def read(self, num_bytes: int) -> bytes:
        if not self._head:
            data: bytes = self._stream.read(num_bytes)
            return data
        data, self._head = self._head[:num_bytes], self._head[num_bytes:]
        return data
