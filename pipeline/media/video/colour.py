"""Converts decoded frames to the colours of an sRGB screen: the matrix of untagged HD, and tone mapping of HDR."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSPECIFIED, BT709, PQ, HLG = 2, 1, 16, 18
"""Numbers of ISO/IEC 23091-2 for matrices (the first two) and transfer functions."""
HD_HEIGHT = 720
"""Frames without a tag have the BT.709 matrix from this height on, and BT.601 below, as players take it."""
WHITE_NITS, PEAK_NITS = 203.0, 1000.0
"""Luminance of graphics white (ITU-R BT.2408), which becomes white, and of what is compressed to white at most."""
KNEE = 0.75
"""Share of white up to which luminance stays linear."""
BT2020_TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)
LUMA = np.array([0.2627, 0.678, 0.0593], np.float32)
"""Weights of BT.2020."""
STRIP_ROWS = 64
"""Rows per step, so that tone mapping needs little memory."""


def rgb_of(frame: Any, width: int, height: int) -> NDArray[np.uint8]:
    """Return a frame resized to `width` x `height` as RGB (height, width, 3); HDR10 and HLG are tone-mapped."""
    matrix = BT709 if frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT else None
    options = {"width": width, "height": height, "src_colorspace": matrix, "interpolation": "BILINEAR"}
    if frame.color_trc not in (PQ, HLG):
        pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24", **options)
        return pixels
    return tone_mapped(frame.to_ndarray(format="rgb48le", **options), frame.color_trc)


def tone_mapped(coded: NDArray[Any], transfer: int) -> NDArray[np.uint8]:
    """Map RGB of BT.2020 (height, width, 3) with `transfer`, of 8 or 16 bits, to sRGB."""
    pixels = np.empty(coded.shape, np.uint8)
    scale = 257 if coded.dtype == np.uint8 else 1
    for row in range(0, len(coded), STRIP_ROWS):
        rows = slice(row, row + STRIP_ROWS)
        pixels[rows] = _tone_mapped(coded[rows].astype(np.uint16) * np.uint16(scale), transfer)
    return pixels


def _tone_mapped(coded: NDArray[np.uint16], transfer: int) -> NDArray[np.uint8]:
    light = _light(transfer)[coded >> 4]
    if transfer == HLG:  # scene light; the display's gamma is that of BT.2100 for a peak of 1000 cd/m2
        light = light * (light @ LUMA)[..., None] ** np.float32(0.2) * np.float32(PEAK_NITS / WHITE_NITS)
    light = np.maximum(light @ BT2020_TO_BT709.T, 0)
    brightest = np.maximum(light.max(axis=-1, keepdims=True), np.float32(1e-6))
    light *= _compressed(brightest) / brightest
    pixels: NDArray[np.uint8] = _codes()[(np.minimum(light, 1) * 4095 + 0.5).astype(np.uint16)]
    return pixels


def _compressed(light: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keep light up to `KNEE`, and map the rest up to the peak to at most 1 by a hyperbola of the same slope."""
    peak = PEAK_NITS / WHITE_NITS
    a = -(KNEE**2) * (peak - 1) / (KNEE**2 - 2 * KNEE + peak)
    b = (KNEE**2 - 2 * KNEE * peak + peak) / (peak - 1)
    scale = (b**2 + 2 * b * KNEE + KNEE**2) / (b - a)
    return np.where(light <= KNEE, light, scale * (light + a) / (light + b)).astype(np.float32)


@cache
def _light(transfer: int) -> NDArray[np.float32]:
    """Return linear light of codes of 12 bits: 1 is white for PQ, and the peak of the scene for HLG."""
    codes = np.linspace(0, 1, 4096)
    if transfer == PQ:
        root = codes ** (32 / 2523)
        ratio = np.maximum(root - 3424 / 4096, 0) / (2413 / 128 - 2392 / 128 * root)
        return (10_000 / WHITE_NITS * ratio ** (16384 / 2610)).astype(np.float32)
    high = (np.exp((codes - 0.55991073) / 0.17883277) + 0.28466892) / 12
    return np.where(codes <= 0.5, codes**2 / 3, high).astype(np.float32)


@cache
def _codes() -> NDArray[np.uint8]:
    """Return sRGB codes of linear light in 4096 steps."""
    light = np.linspace(0, 1, 4096)
    codes = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return (255 * codes + 0.5).astype(np.uint8)
