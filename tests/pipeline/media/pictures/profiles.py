"""Colour profiles of known primaries and curves, and the sRGB values of colours in them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

WHITE = (0.9642, 1.0, 0.8249)
"""XYZ of the white point D50, to which all matrices below are adapted."""
SRGB = ((0.43607, 0.38515, 0.14307), (0.22249, 0.71687, 0.06061), (0.01392, 0.09708, 0.71410))
P3 = ((0.51512, 0.29198, 0.15710), (0.24120, 0.69225, 0.06657), (-0.00105, 0.04189, 0.78407))
ADOBE = ((0.60974, 0.20528, 0.14919), (0.31111, 0.62567, 0.06322), (0.01947, 0.06087, 0.74457))
"""Matrices from linear RGB to XYZ: IEC 61966-2-1, Display P3, Adobe RGB (1998)."""


def _linear(values: np.ndarray) -> np.ndarray:
    """Linear light of values 0 to 1 with the curve of sRGB, which Display P3 has too."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _curved(light: np.ndarray) -> np.ndarray:
    light = light.clip(0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


_SRGB_CURVE = struct.pack(">4sIHH", b"para", 0, 3, 0) + struct.pack(
    ">5i", *(round(65536 * value) for value in (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045))
)
_ADOBE_CURVE = struct.pack(">4sIIHH", b"curv", 0, 1, 563, 0)
_GREY_CURVE = struct.pack(">4sIIHH", b"curv", 0, 1, 256, 0)


@dataclass(frozen=True)
class Space:
    """A colour space: its profile, and the sRGB values (0 to 255) of device values (0 to 1)."""

    profile: bytes
    to_srgb: Callable[[np.ndarray], np.ndarray]


def _xyz(values: tuple[float, ...]) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * value) for value in values))


def _profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """An ICC profile of version 2.4 for a display."""
    name = b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(78)
    tags = {b"desc": name, b"cprt": b"text\0\0\0\0x\0", b"wtpt": _xyz(WHITE), **tags}
    start, table, body = 132 + 12 * len(tags), b"", b""
    for tag, value in tags.items():
        table += tag + struct.pack(">II", start + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">II", start + len(body), 0) + struct.pack(">I", 0x02400000) + b"mntr" + space + b"XYZ "
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp"
    head = head.ljust(68, b"\0") + _xyz(WHITE)[8:]
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _rgb(matrix: tuple[tuple[float, ...], ...], curve: bytes, linear: Callable[[np.ndarray], np.ndarray]) -> Space:
    tags = {name + b"XYZ": _xyz(column) for name, column in zip((b"r", b"g", b"b"), zip(*matrix))}
    tags |= {name + b"TRC": curve for name in (b"r", b"g", b"b")}
    between = np.linalg.inv(np.array(SRGB)) @ np.array(matrix)
    return Space(_profile(b"RGB ", tags), lambda values: 255 * _curved(linear(values) @ between.T))


@cache
def spaces() -> dict[str, Space]:
    """All spaces by name; `cmyk` is libvips' own, whose sRGB values only colour engines know."""
    import pyvips

    return {
        "srgb": _rgb(SRGB, _SRGB_CURVE, _linear),
        "p3": _rgb(P3, _SRGB_CURVE, _linear),
        "adobe": _rgb(ADOBE, _ADOBE_CURVE, lambda values: values ** (563 / 256)),
        "grey": Space(_profile(b"GRAY", {b"kTRC": _GREY_CURVE}), lambda values: 255 * _curved(values)),
        "cmyk": Space(bytes(pyvips.Operation.call("profile_load", "cmyk")), lambda values: values),
    }
