"""Colour spaces that images name without a profile: numbers of ISO/IEC 23091-2 (CICP) in AVIF, HEIF and PNG, and gAMA
and cHRM of PNG."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_BOXES = 1000
"""Maximum number of boxes, chunks and properties that are read in search of a colour space."""
BT709, BT2020 = 1, 9
LINEAR, PQ, HLG = 8, 16, 18
"""Numbers of primaries, and of transfer functions."""
Chromaticities = tuple[float, ...]
"""x and y of white, red, green and blue."""
_D65 = (0.3127, 0.3290)
SRGB_PRIMARIES: Chromaticities = (*_D65, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
PRIMARIES: dict[int, Chromaticities] = {
    BT709: SRGB_PRIMARIES,
    5: (*_D65, 0.64, 0.33, 0.29, 0.60, 0.15, 0.06),
    6: (*_D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    7: (*_D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    BT2020: (*_D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    12: (*_D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
}
GAMMAS = {4: 2.2, 5: 2.8, LINEAR: 1.0}
"""Exponents of transfer functions; the others of SDR, those of cameras too, are shown with the curve of sRGB."""
SRGB_GAMMA, MAX_GAMMA_ERROR = 2.2, 0.05
"""PNGs of sRGB state this exponent; a near one means the curve of sRGB."""
MAX_GAMMA = 10.0
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
"""Parameters of the curve of sRGB in a profile."""
_D50 = np.array([0.9642, 1.0, 0.8249])
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


@dataclass(frozen=True)
class NamedSpace:
    """Primaries of a colour space, with its exponent (None: the curve of sRGB) or its transfer function of HDR."""

    primaries: Chromaticities
    gamma: float | None = None
    hdr: int | None = None


def named_space(image: Image.Image, data: bytes | bytearray | memoryview) -> NamedSpace | None:
    """Return the named colour space of an image that was opened from `data`; None if it has none. In a PNG, the
    numbers of CICP take precedence over a profile, and a profile over gAMA."""
    view, has_profile = memoryview(data), bool(image.info.get("icc_profile"))
    try:
        if image.format == "PNG":
            codes = _codes_of_png(view)
            return _coded(*codes) if codes else None if has_profile else _of_gamma(image)
        if image.format in ("AVIF", "HEIF") and not has_profile:
            codes = _codes_of_heif(view)
            return _coded(*codes) if codes else None
    except (struct.error, IndexError, ValueError):
        return None
    return None


def _coded(primaries: int, transfer: int) -> NamedSpace | None:
    """Return the space of two numbers of CICP; None for unknown ones."""
    if transfer in (PQ, HLG):
        return NamedSpace(PRIMARIES.get(primaries, ()), hdr=transfer)
    return None if primaries not in PRIMARIES else NamedSpace(PRIMARIES[primaries], GAMMAS.get(transfer))


def _codes_of_png(data: memoryview) -> tuple[int, int] | None:
    """Return primaries and transfer function in a chunk cICP before the pixels."""
    position = 8
    for _ in range(MAX_BOXES):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        if kind == b"cICP":
            return data[position + 8], data[position + 9]
        if kind == b"IDAT":
            return None
        position += 12 + length
    return None


def _of_gamma(image: Image.Image) -> NamedSpace | None:
    """Return the space of gAMA and cHRM; cHRM alone is ignored, as by browsers."""
    stated, primaries = image.info.get("gamma"), image.info.get("chromaticity", SRGB_PRIMARIES)
    if "srgb" in image.info or not isinstance(stated, float) or not 1 / MAX_GAMMA < stated < MAX_GAMMA:
        return None
    is_srgb_curve = abs(stated * SRGB_GAMMA - 1) <= MAX_GAMMA_ERROR
    if is_srgb_curve and np.abs(np.subtract(primaries, SRGB_PRIMARIES)).max() < 0.005:
        return None
    return NamedSpace(tuple(primaries), None if is_srgb_curve else 1 / stated)


def _codes_of_heif(data: memoryview) -> tuple[int, int] | None:
    """Return primaries and transfer function of the primary item of an AVIF or HEIF."""
    [meta] = _children(data, b"meta")
    meta = meta[4:]
    [start] = _children(meta, b"pitm")
    item = int.from_bytes(start[4:6] if start[0] == 0 else start[4:8], "big")
    [both] = _children(meta, b"iprp")
    [container] = _children(both, b"ipco")
    properties = list(_boxes(container))
    for associations in _children(both, b"ipma"):
        for index in _properties_of(associations, item):
            kind, body = properties[index - 1]
            if kind == b"colr" and bytes(body[:4]) == b"nclx":
                primaries, transfer = struct.unpack(">HH", body[4:8])
                return primaries, transfer
    return None


def _properties_of(associations: memoryview, item: int) -> Iterator[int]:
    """Yield the indices of an item's properties, from 1 on."""
    is_wide, size = associations[3] & 1, 4 if associations[0] else 2
    (num_items,) = struct.unpack(">I", associations[4:8])
    position = 8
    for _ in range(min(num_items, MAX_BOXES)):
        number = int.from_bytes(associations[position : position + size], "big")
        count = associations[position + size]
        position += size + 1
        for _ in range(count):
            index = int.from_bytes(associations[position : position + 1 + is_wide], "big")
            position += 1 + is_wide
            if number == item and (index := index & (0x7FFF if is_wide else 0x7F)):
                yield index


def _children(data: memoryview, name: bytes) -> list[memoryview]:
    return [body for kind, body in _boxes(data) if kind == name]


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of adjacent boxes."""
    position = 0
    for _ in range(MAX_BOXES):
        if len(data) - position < 8:
            return
        size, kind = struct.unpack(">I4s", data[position : position + 8])
        head = 8
        if size == 1:
            head, (size,) = 16, struct.unpack(">Q", data[position + 8 : position + 16])
        size = size or len(data) - position
        if size < head:
            return
        yield kind, data[position + head : position + size]
        position += size


@lru_cache(maxsize=8)
def profile_of(space: NamedSpace, grey: bool) -> bytes | None:
    """Return an ICC profile of version 2 of a space, for grey or RGB pixels; None for impossible primaries, and for
    grey with the curve of sRGB."""
    if grey and space.gamma is None:
        return None
    form, values = (3, SRGB_CURVE) if space.gamma is None else (0, (space.gamma,))
    curve = struct.pack(f">4sIHH{len(values)}i", b"para", 0, form, 0, *(round(65536 * value) for value in values))
    tags = {b"wtpt": _xyz(_D50)}
    if grey:
        tags[b"kTRC"] = curve
    else:
        matrix = _to_xyz(space.primaries)
        if matrix is None:
            return None
        tags |= {name + b"XYZ": _xyz(column) for name, column in zip((b"r", b"g", b"b"), matrix.T, strict=True)}
        tags |= {name + b"TRC": curve for name in (b"r", b"g", b"b")}
    start, table, body = 132 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        table += struct.pack(">4sII", name, start + len(body), len(value))
        body += value.ljust(-(-len(value) // 4) * 4, b"\0")
    kinds = (b"mntr", b"GRAY" if grey else b"RGB ", b"XYZ ", b"acsp")
    head = struct.pack(">I4xI4s4s4s12x4s", start + len(body), 0x02400000, *kinds)
    head = head.ljust(68, b"\0") + _xyz(_D50)[8:]
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _xyz(values: NDArray[Any]) -> bytes:
    return struct.pack(">4sI3i", b"XYZ ", 0, *(round(65536 * float(value)) for value in values))


def _to_xyz(primaries: Chromaticities) -> NDArray[Any] | None:
    """Return the matrix from linear RGB to XYZ adapted to D50 (Bradford); None if it does not exist."""
    points = np.array(primaries, float).reshape(4, 2)
    if (points[:, 1] <= 0.001).any() or np.abs(points).max() > 1:
        return None
    white, *colours = [np.array([x / y, 1, (1 - x - y) / y]) for x, y in points]
    columns = np.stack(colours, axis=1)
    if abs(np.linalg.det(columns)) < 1e-4:
        return None
    cones = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    matrix: NDArray[Any] = np.linalg.inv(_BRADFORD) @ cones @ _BRADFORD @ (columns * np.linalg.solve(columns, white))
    return matrix
