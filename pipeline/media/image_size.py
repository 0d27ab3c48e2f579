"""Reads width and height of images from their headers in pure Python, so that no native code parses the bytes."""

from __future__ import annotations

import struct

Size = tuple[int, int]
MAX_JPEG_SEGMENTS = 1000
"""Maximum number of segments of a JPEG that are read in search of its frame header."""
_NO_FRAME = (0xC4, 0xC8, 0xCC)
"""JPEG markers between 0xC0 and 0xCF that are no frame headers."""


def size_of(data: bytes | memoryview) -> Size | None:
    """Return width and height in pixels from the header; None for other formats and damaged headers."""
    try:
        width, height = _read(bytes(data[:32]), memoryview(data))
    except (struct.error, IndexError, ValueError):
        return None
    return (width, height) if width > 0 and height > 0 else None


def _read(head: bytes, data: memoryview) -> Size:
    """Return width and height from the header; ValueError for other formats, also other errors for damaged headers."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _pair(">II", head[16:24])
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return _pair("<HH", head[6:10])
    if head[:2] == b"BM":
        width, height = _pair("<HH", head[18:22]) if head[14:18] == b"\x0c\0\0\0" else _pair("<ii", head[18:26])
        return width, abs(height)
    raise ValueError("an unknown format")


def _pair(form: str, data: bytes | memoryview) -> Size:
    first, second = struct.unpack(form, data)
    return first, second


def _jpeg(data: memoryview) -> Size:
    """Return the size in the last frame header before the first scan, which Pillow uses."""
    size = (0, 0)
    position = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[position] != 0xFF:
            break
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == 0xDA:
            return size
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a segment
            position += 2
            continue
        (length,) = struct.unpack(">H", data[position + 2 : position + 4])
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            size = _pair(">HH", data[position + 5 : position + 9])[::-1]
        position += 2 + length
    raise ValueError("no scan")


def _webp(head: bytes) -> Size:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[21:25])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = _pair("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("an unknown kind of WebP")
