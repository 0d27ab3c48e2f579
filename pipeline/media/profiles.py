"""Finds the embedded colour profile of an image, also in formats in which Pillow does not read it."""

from __future__ import annotations

import struct

from PIL import Image

MAX_BOXES = 100
"""Maximum number of boxes of a JPEG 2000 that are read in search of its profile."""
_BMP_V5_BYTES, _EMBEDDED = 124, b"DEBM"
_RESTRICTED_PROFILE, _ANY_PROFILE = 2, 3
"""Methods of a colour box with a profile."""


def embedded_profile(image: Image.Image, data: bytes | bytearray | memoryview) -> bytes | None:
    """Return the profile of an image that was opened from `data`; None if it has none."""
    profile = image.info.get("icc_profile")
    if image.format == "BMP":
        profile = _of_bmp(memoryview(data))
    elif image.format == "JPEG2000" and not profile:
        profile = _of_jpeg_2000(memoryview(data), 0, len(data))
    return profile if isinstance(profile, bytes) and profile else None


def _of_bmp(data: memoryview) -> bytes | None:
    """Return the profile in a BMP with a header of version 5."""
    if len(data) < 14 + _BMP_V5_BYTES or int.from_bytes(data[14:18], "little") != _BMP_V5_BYTES:
        return None
    kind, start, size = bytes(data[70:74]), *struct.unpack("<II", data[126:134])
    return bytes(data[14 + start : 14 + start + size]) if kind == _EMBEDDED else None


def _of_jpeg_2000(data: memoryview, position: int, end: int) -> bytes | None:
    """Return the profile in the header of a JPEG 2000 with boxes (JP2)."""
    for _ in range(MAX_BOXES):
        if end - position < 12:
            return None
        size, kind = struct.unpack(">I4s", data[position : position + 8])
        if size < 8:  # the last box, or one above 4 GiB
            return None
        body, stop = position + 8, min(position + size, end)
        if kind == b"jp2h":
            return _of_jpeg_2000(data, body, stop)
        if kind == b"colr" and data[body] in (_RESTRICTED_PROFILE, _ANY_PROFILE):
            return bytes(data[body + 3 : stop])
        position = stop
    return None
