"""Other libraries that read pictures: to 8-bit sRGB, upright, over white."""

from __future__ import annotations

import cv2
import numpy as np
import pyvips

cv2.setNumThreads(1)

TURNS = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: lambda stored: np.rot90(stored, 1),
}
"""From stored to upright for each orientation of Exif."""
UNTURNS = {**TURNS, 6: TURNS[8], 8: TURNS[6]}


def over_white(samples: np.ndarray) -> np.ndarray:
    """RGB of samples 0 to 1 (height, width, 1 to 4), with alpha over white."""
    alpha = samples[..., -1:] if samples.shape[2] in (2, 4) else 1.0
    colours = samples[..., : 1 if samples.shape[2] < 3 else 3]
    return np.broadcast_to(1 - alpha * (1 - colours), (*samples.shape[:2], 3))


def opencv(data: bytes, orientation: int, has_alpha: bool) -> np.ndarray | None:
    """The picture by OpenCV. It applies no alpha, and turns pictures with alpha only if they are TIFFs."""
    flag = cv2.IMREAD_UNCHANGED if has_alpha else cv2.IMREAD_COLOR
    found = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if found is None:
        return None
    if has_alpha and data[:2] not in (b"II", b"MM"):
        found = TURNS[orientation](found)
    channels = found.reshape(*found.shape[:2], -1) / np.iinfo(found.dtype).max
    if channels.shape[2] >= 3:
        channels = channels[..., [2, 1, 0, *range(3, channels.shape[2])]]
    return 255 * over_white(channels)


def libvips(data: bytes) -> np.ndarray | None:
    """The picture by libvips, with its own conversion of profiles. For the perceptual intent, its colour engine
    compensates black points, which browsers do not."""
    try:
        image = pyvips.Image.new_from_buffer(data, "").autorot()
        if image.get_typeof("icc-profile-data"):
            image = image.icc_transform("srgb", embedded=True, intent="relative")
        image = image.colourspace("srgb")
        found = image.numpy()
    except pyvips.Error:
        return None
    return 255 * over_white(found.reshape(*found.shape[:2], -1) / 255.0)
