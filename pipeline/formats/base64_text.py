"""Decodes media that are text: `data:` URIs, as browsers read them, and base64 without a URI."""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote_to_bytes

from pipeline.formats.limits import DATA_URI_FACTOR
from pipeline.rows.schemas import RowError

_WHITE_SPACE = b" \t\n\r\f"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_IS_BASE64 = re.compile(r";\s*base64\s*$", re.IGNORECASE)
_TEXT = re.compile(r"\s*[A-Za-z0-9+/_-][A-Za-z0-9+/_\s-]*=?\s*=?\s*", re.ASCII)
_MIN_CHARS = 40
"""Characters that base64 of an image has at least; the smallest images have more."""
_HEAD_CHARS = 24
_IMAGES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*"
    rb"|\0\0\0.(?:ftyp|jP  |JXL )|\xff\x4f\xff\x51",
    re.DOTALL,
)
"""First bytes of the encoded images that are recognised in text."""


def decode_base64(text: bytes) -> bytes:
    """Decode base64, standard or url-safe, with or without padding and line breaks; ValueError for anything else."""
    data = text.translate(_TO_STANDARD, _WHITE_SPACE).rstrip(b"=")
    if len(data) % 4 == 1:
        raise ValueError("base64 is cut short")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def read_data_uri(uri: str, max_bytes: int) -> bytes:
    """Decode a `data:` URI to bytes; RowError `invalid_value` or `image_too_large`."""
    head, comma, body = uri.partition(",")
    if len(body) > DATA_URI_FACTOR * max_bytes:
        raise RowError("image_too_large", f"a data URI has more than {max_bytes} bytes")
    try:
        if not comma:
            raise ValueError("it has no comma")
        data = unquote_to_bytes(body)
        data = decode_base64(data) if _IS_BASE64.search(head) else data
    except ValueError as error:
        raise RowError("invalid_value", f"a data URI cannot be read: {error}") from None
    if len(data) > max_bytes:
        raise RowError("image_too_large", f"a data URI has {len(data)} bytes, more than {max_bytes}")
    return data


def image_in_text(text: str) -> bytes | None:
    """Decode base64 of an image that begins like one of a known format; None for other text, such as a path."""
    if len(text) < _MIN_CHARS:
        return None
    head = "".join(text[: 2 * _HEAD_CHARS].split())[:_HEAD_CHARS]
    try:
        if not _IMAGES.match(decode_base64(head.encode("ascii"))) or not _TEXT.fullmatch(text):
            return None
        return decode_base64(text.encode("ascii"))
    except ValueError:
        return None
