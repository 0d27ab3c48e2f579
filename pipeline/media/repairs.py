"""Leaves out damage that other readers tolerate: metadata of PNG files, and missing end markers of JPEG files. Also
rewrites valid BMP files that Pillow does not read."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

from PIL import PngImagePlugin

from pipeline.media.bitfields import standard_bmp

MAX_PNG_CHUNKS = 100_000
"""Maximum number of chunks of a PNG that is repaired."""
MAX_JPEG_SEGMENTS = 1000
"""Maximum number of segments of a JPEG that is repaired."""
MAX_TEXT_BYTES = 1 << 16
"""Maximum encoded size of a text chunk that a repair keeps, because it may contain the orientation."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT_CHUNKS = (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"iCCP", b"eXIf", b"zTXt", b"iTXt", b"tEXt")
_KEPT_TEXTS = (b"Raw profile type exif\0", b"Raw profile type APP1\0")
_MIN_TRANSPARENCY = {0: 2, 2: 6}
"""Bytes of a transparent colour for the colour types grey and RGB."""
_END_OF_IMAGE = b"\xff\xd9"
_RESTARTS = [bytes((0xFF, 0xD0 + number)) for number in range(8)]
_FILLERS = [bytes((first, 0x17, first, 0x6B)) * 64 for first in (0x55, 0x92, 0xDB)]
"""Data that are decoded to pixels where those of a JPEG end early. Its decoder fills in zeros, which may be the codes
that were lost by chance; some of these data begin with a code that has another meaning."""
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")

_ANIMATED, _HAS_ALPHA = 0x02, 0x10
"""Flags of an extended WebP."""

_JPEG_2000 = (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n")


def with_alpha(data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """Return the data of an image, with the alpha flag set in an animated WebP: frames may leave parts of the canvas
    clear, which Pillow makes black without that flag."""
    if bytes(data[8:16]) == b"WEBPVP8X" and len(data) > 20 and data[20] & _ANIMATED and not data[20] & _HAS_ALPHA:
        data = bytearray(data)
        data[20] |= _HAS_ALPHA
    return data


def variants(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """Yield repaired forms of an image that cannot be decoded; it is whole if all forms have the same pixels. Yields
    nothing if there is no repair."""
    data = bytes(data)
    if data.startswith(PNG_SIGNATURE) and len(data) > 33:
        yield b"".join(_png_chunks(data))
    elif data.startswith(b"\xff\xd8"):
        stripped = data.rstrip(b"\0")
        if stripped.endswith(b"\xff"):  # half of an end marker, or a value of the pixels, which a zero follows
            stripped += b"\0"
        if not stripped.endswith(_END_OF_IMAGE) and _has_all_scans(stripped):
            yield stripped + _END_OF_IMAGE
            markers = _next_restarts(stripped)
            for filler in _FILLERS:
                yield stripped + filler + b"".join(marker + filler for marker in markers) + _END_OF_IMAGE
    elif data.startswith(_JPEG_2000):  # its decoder checks that all tiles are there
        yield data.removesuffix(b"\xff") + _END_OF_IMAGE
    elif (bmp := standard_bmp(data)) is not None:
        yield bmp


def _png_chunks(data: bytes) -> Iterator[bytes]:
    """Yield the signature and the chunks that pixels, colours and orientation need, with an end chunk."""
    yield PNG_SIGNATURE
    position = len(PNG_SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        head = data[position : position + 8]
        if len(head) < 8 or head[4:] == b"IEND":
            break
        length, kind = struct.unpack(">I4s", head)
        body = data[position + 8 : position + 8 + length]
        checksum = data[position + 8 + length : position + 12 + length]
        is_whole = len(body) == length and checksum == struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))
        if kind in _KEPT_CHUNKS and (is_whole or not kind[0] & 0x20) and _fits(kind, body, data[25]):
            yield struct.pack(">I4s", len(body), kind) + body + checksum
        position += 12 + length
    yield struct.pack(">I4sI", 0, b"IEND", zlib.crc32(b"IEND"))


def _fits(kind: bytes, body: bytes, colour_type: int) -> bool:
    """Return whether Pillow accepts the size of a text, profile or transparent colour; True for other chunks."""
    if kind == b"iCCP":
        try:
            method_at = body.index(b"\0") + 1
            limit = PngImagePlugin.MAX_TEXT_CHUNK
            return body[method_at] == 0 and len(zlib.decompressobj().decompress(body[method_at + 1 :], limit)) < limit
        except (ValueError, IndexError, zlib.error):
            return False
    if kind == b"tRNS":
        return len(body) >= _MIN_TRANSPARENCY.get(colour_type, 0)
    return not kind.endswith(b"Xt") or (len(body) <= MAX_TEXT_BYTES and body.startswith(_KEPT_TEXTS))


def _next_restarts(data: bytes) -> list[bytes]:
    """Return all restart markers in the order in which they would follow the last one of the last scan."""
    start = max(data.rfind(b"\xff\xda"), 0)
    positions = [data.rfind(marker, start) for marker in _RESTARTS]
    last = positions.index(max(positions)) if max(positions) >= 0 else -1
    return _RESTARTS[last + 1 :] + _RESTARTS[: last + 1]


def _has_all_scans(data: bytes) -> bool:
    """Return whether the scans of a JPEG contain all coefficients of all components in full precision."""
    missing: dict[int, set[int]] = {}
    position = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        match = _NEXT_SEGMENT.search(data, position)
        if match is None:
            return bool(missing) and not any(missing.values())
        start = match.end()
        marker, length = data[start - 1], int.from_bytes(data[start : start + 2], "big")
        body = data[start + 2 : start + length]
        position = start if marker in (0x01, 0xD8) else start + length
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            missing = {component: set(range(64)) for component in body[6::3]}
        elif marker == 0xDA and len(body) >= 4 and len(body) == 1 + 2 * body[0] + 3:
            first, last, precision = body[-3:]
            if precision & 0x0F == 0:
                for component in body[1:-3:2]:
                    missing.get(component, set()).difference_update(range(first, last + 1))
    return False
