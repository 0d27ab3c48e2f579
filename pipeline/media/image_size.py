"""Width and height of an encoded image from its header, in plain Python: no native code reads the bytes.

Used to cut decoding tasks by decoded bytes before decoding. Supports PNG, JPEG, WebP, GIF and BMP; the size of any
other image is unknown.
"""

from __future__ import annotations

import struct

MAX_JPEG_SEGMENTS = 1000
"""Segments before the frame header of a JPEG that are skipped at most."""
_NO_FRAME = (0xC4, 0xC8, 0xCC)
"""Markers between 0xC0 and 0xCF that start no frame."""


def size_of(data: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height in pixels as the header states them; None where they are not found."""
    try:
        head = bytes(data[:32])
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            return _checked(*struct.unpack(">II", head[16:24]))
        if head.startswith(b"\xff\xd8\xff"):
            return _jpeg(memoryview(data))
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp(head)
        if head[:6] in (b"GIF87a", b"GIF89a"):
            return _checked(*struct.unpack("<HH", head[6:10]))
        if head[:2] == b"BM":
            return _bmp(head)
    except (struct.error, IndexError):
        pass
    return None


def _checked(width: int, height: int) -> tuple[int, int] | None:
    return (width, height) if width > 0 and height > 0 else None


def _jpeg(data: memoryview) -> tuple[int, int] | None:
    """The size in the last frame header before the first scan, which is the one that counts for Pillow."""
    found: tuple[int, int] | None = None
    place = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker == 0xDA:
            return found
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a segment
            place += 2
            continue
        (length,) = struct.unpack(">H", data[place + 2 : place + 4])
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            found = _checked(width, height)
        place += 2 + length
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(head[place : place + 3], "little") for place in (24, 27))
        return _checked(width, height)
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[21:25])
        return _checked(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return _checked(width & 0x3FFF, height & 0x3FFF)
    return None


def _bmp(head: bytes) -> tuple[int, int] | None:
    (length,) = struct.unpack("<I", head[14:18])
    if length == 12:
        return _checked(*struct.unpack("<HH", head[18:22]))
    width, height = struct.unpack("<ii", head[18:26])
    return _checked(width, abs(height))
