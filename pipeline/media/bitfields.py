"""Rewrites BMP images whose masks of channels Pillow does not read."""

from __future__ import annotations

import struct

import numpy as np

_WITH_MASKS = (3, 6)
"""Compressions BI_BITFIELDS and BI_ALPHABITFIELDS."""
_HEADER_BYTES, _FIRST_MASK, _ALPHA_HEADER_BYTES = 40, 54, 56
MAX_CHANNEL_BITS = 16


def standard_bmp(data: bytes) -> bytes | None:
    """Return the image as a BMP with 8 bits per channel; None if it is no whole BMP with masks."""
    if not data.startswith(b"BM") or len(data) < _FIRST_MASK + 16:
        return None
    start, header_bytes, width, height = struct.unpack("<IIii", data[10:26])
    bits, compression = struct.unpack("<HI", data[28:34])
    if header_bytes < _HEADER_BYTES or compression not in _WITH_MASKS or bits not in (16, 32):
        return None
    num_masks = 4 if header_bytes >= _ALPHA_HEADER_BYTES or compression == _WITH_MASKS[1] else 3
    red, green, blue, alpha = (*struct.unpack(f"<{num_masks}I", data[_FIRST_MASK:][: 4 * num_masks]), 0)[:4]
    rows, stride = abs(height), (width * bits + 31) // 32 * 4
    if width <= 0 or rows == 0 or rows * stride > len(data) - start or not all(map(_is_channel, (red, green, blue))):
        return None
    words = np.frombuffer(data, f"<u{bits // 8}", rows * stride * 8 // bits, start).reshape(rows, -1)[:, :width]
    alpha = alpha if _is_channel(alpha) else 0
    body = np.zeros((rows, width, 4), np.uint8)
    for index, mask in enumerate((blue, green, red, alpha)):
        if mask:
            shift = (mask & -mask).bit_length() - 1
            top = mask >> shift
            values = (words >> np.array(shift, words.dtype)).astype(np.uint32) & np.uint32(top)
            body[..., index] = (values * np.uint32(255) + np.uint32(top // 2)) // np.uint32(top)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000 if alpha else 0)
    header = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, body.nbytes, 0, 0, 0, 0) + masks + bytes(52)
    return b"BM" + struct.pack("<IHHI", 122 + body.nbytes, 0, 0, 122) + header + body.tobytes()


def _is_channel(mask: int) -> bool:
    """Return whether a mask has 1 to `MAX_CHANNEL_BITS` adjacent bits."""
    top = mask // (mask & -mask) if mask else 0
    return 0 < top < 1 << MAX_CHANNEL_BITS and not top & (top + 1)
