"""Encoded images with layouts, chunks and profiles that Pillow does not write."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from PIL import ImageCms

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, body: bytes) -> bytes:
    """One chunk of a PNG with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(samples: np.ndarray, bits: int, *before: bytes, after: bytes = b"") -> bytes:
    """A grey or RGB PNG of these samples (height, width[, 3]), with chunks before and after its pixels."""
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, bits, 2 if samples.ndim == 3 else 0, 0, 0, 0)
    rows = b"".join(b"\0" + packed(row, bits) for row in samples.reshape(height, -1))
    body = chunk(b"IHDR", header) + b"".join(before) + chunk(b"IDAT", zlib.compress(rows))
    return SIGNATURE + body + after + chunk(b"IEND", b"")


def packed(row: np.ndarray, bits: int, order: str = ">") -> bytes:
    """Samples of one row with this number of bits each, in `order` if they are whole words."""
    if bits == 16:
        return row.astype(f"{order}u2").tobytes()
    words = row.astype(">u2").view(np.uint8).reshape(-1, 2)
    return np.packbits(np.unpackbits(words, axis=1)[:, 16 - bits :].reshape(-1)).tobytes()


def tiff(
    samples: np.ndarray,
    bits: int,
    photometric: int = 1,
    order: str = "<",
    tags: dict[int, list[int]] | None = None,
    separate: bool = False,
) -> bytes:
    """An uncompressed TIFF of these samples (height, width[, channels]) in one strip, or one for each channel; `tags`
    have values of 16 bits."""
    height, width = samples.shape[:2]
    channels = samples.reshape(height, width, -1)
    count = channels.shape[2]
    planes = [channels[..., index] for index in range(count)] if separate else [channels]
    strips = [b"".join(packed(row, bits, order) for row in plane.reshape(height, -1)) for plane in planes]
    data = b"".join(strips)
    offsets = [8 + sum(map(len, strips[:index])) for index in range(len(strips))]
    entries = {
        256: [width],
        257: [height],
        258: [bits] * count,
        259: [1],
        262: [photometric],
        273: offsets,
        277: [count],
        278: [height],
        279: [len(strip) for strip in strips],
        284: [2 if separate else 1],
        **(tags or {}),
    }
    data += b"\0" * (len(data) % 2)
    directory, end = b"", 8 + len(data)
    for tag, values in sorted(entries.items()):
        form = "I" if tag in (273, 279) else "H"
        value = struct.pack(f"{order}{len(values)}{form}", *values)
        if len(value) > 4:
            data += value
            value, end = struct.pack(f"{order}I", end), end + len(value)
        directory += struct.pack(f"{order}HHI", tag, 4 if form == "I" else 3, len(values)) + value.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(f"{order}I", end)
    return head + data + struct.pack(f"{order}H", len(entries)) + directory + b"\0" * 4


BGRA = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
"""Masks of red, green, blue and alpha."""


def bmp(samples: np.ndarray, bits: int = 32, masks: tuple[int, ...] = BGRA, header_bytes: int = 108) -> bytes:
    """A top-down BMP with masks of channels, of 8-bit samples (height, width, channels) in the order of the masks."""
    height, width = samples.shape[:2]
    words = np.zeros((height, width), np.int64)
    for index, mask in enumerate(masks):
        if mask:
            lowest = mask & -mask
            words |= (samples[..., index].astype(np.int64) * (mask // lowest) + 127) // 255 * lowest
    data = words.astype(f"<u{bits // 8}").tobytes()
    compression = 6 if header_bytes == 40 and len(masks) == 4 else 3
    header = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, bits, compression, len(data), 0, 0, 0, 0)
    header = struct.pack("<I", header_bytes) + header[4:] + struct.pack(f"<{len(masks)}I", *masks)
    header = header.ljust(header_bytes, b"\0")
    start = 14 + len(header)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + data


def bmp_v5(picture: np.ndarray, profile: bytes) -> bytes:
    """A top-down BMP of these RGB values (height, width, 3) with a profile behind them; width a multiple of 4."""
    height, width = picture.shape[:2]
    data = picture[..., ::-1].tobytes()
    header = struct.pack("<IiiHHIIiiII", 124, width, -height, 1, 24, 0, len(data), 0, 0, 0, 0) + bytes(16) + b"DEBM"
    header = header.ljust(112, b"\0") + struct.pack("<III", 124 + len(data), len(profile), 0)
    return b"BM" + struct.pack("<IHHI", 138 + len(data) + len(profile), 0, 0, 138) + header + data + profile


def jp2_with(data: bytes, profile: bytes) -> bytes:
    """A JPEG 2000 (JP2) with a profile in place of its named colour space."""
    header, colours = data.index(b"jp2h") - 4, data.index(b"colr") - 4
    size = int.from_bytes(data[colours : colours + 4], "big")
    box = struct.pack(">I", 11 + len(profile)) + b"colr\x02\0\0" + profile
    grown = int.from_bytes(data[header : header + 4], "big") + len(box) - size
    return data[:header] + struct.pack(">I", grown) + data[header + 4 : colours] + box + data[colours + size :]


def srgb_profile() -> bytes:
    """A profile of sRGB."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped_profile() -> bytes:
    """A profile whose first channel is blue and whose last is red."""
    profile = srgb_profile()
    for old, new in ((b"rXYZ", b"tmp "), (b"bXYZ", b"rXYZ"), (b"tmp ", b"bXYZ")):
        at = profile.index(old, 128)
        profile = profile[:at] + new + profile[at + 4 :]
    return profile


def grey_profile() -> bytes:
    """A profile of linear grey."""
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
    curve = b"curv\0\0\0\0" + struct.pack(">I", 0)
    table = struct.pack(">I", 2) + b"wtpt" + struct.pack(">II", 156, 20) + b"kTRC" + struct.pack(">II", 176, 12)
    header = struct.pack(">II", 188, 0) + struct.pack(">I", 0x02400000) + b"mntrGRAYXYZ " + bytes(12) + b"acsp"
    return header.ljust(68, b"\0") + struct.pack(">3i", 63190, 65536, 54061).ljust(60, b"\0") + table + white + curve
