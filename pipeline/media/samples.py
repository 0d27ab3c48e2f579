"""Scales samples of 16 bits to 8 bits by their range, and reads how a TIFF, PNG or BMP stores its samples."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, TiffImagePlugin

DEEP_GREY = "I;16"
_BITS, _PHOTOMETRIC, _MAX_SAMPLE, _PLANES, _EXTRA_SAMPLES = 258, 262, 281, 284, 338
"""Tags of TIFF 6.0."""
_WHITE_IS_ZERO, _SEPARATE = 0, 2
_OTHER_BYTE = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}
"""Byte orders of Pillow's raw modes with 16 bits, which read the high byte, and those that read the low byte."""


class UndefinedRange(ValueError):
    """The pixels have no defined range or colour."""


def register_layouts() -> None:
    """Add layouts of TIFF that Pillow's decoders read and its table of layouts does not have."""
    layouts: dict[Any, tuple[str, str]] = TiffImagePlugin.OPEN_INFO
    layouts.setdefault((TiffImagePlugin.MM, 0, (1,), 1, (16,), ()), ("I;16B", "I;16B"))
    for order in (TiffImagePlugin.II, TiffImagePlugin.MM):
        for photometric in (0, 1):
            layouts.setdefault((order, photometric, (1,), 1, (12,), ()), (DEEP_GREY, "I;12"))


def tag(image: Image.Image, number: int) -> int | None:
    """Return the first value of a TIFF tag; None if the image has no such tag or is no TIFF."""
    value: Any = getattr(image, "tag_v2", {}).get(number)
    if isinstance(value, tuple):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return the layout of the encoded samples of an image that is not loaded yet; empty if unknown."""
    arguments: Any = image.tile[0].args if image.tile else ""
    if isinstance(arguments, tuple):
        arguments = arguments[0] if arguments else ""
    return arguments if isinstance(arguments, str) else ""


def is_misread(image: ImageFile.ImageFile) -> bool:
    """Return whether only libtiff reads the image right: planes of 16-bit samples, which Pillow reads as 8-bit."""
    return tag(image, _PLANES) == _SEPARATE and (tag(image, _BITS) or 8) > 8 and _raw_mode(image) in ("R", "C")


def scale_transparency(image: ImageFile.ImageFile) -> None:
    """Scale the transparent value of a PNG with 2 or 4 bits of grey to 8 bits, as its pixels; call it before `load`."""
    value, mode = image.info.get("transparency"), _raw_mode(image)
    if image.format == "PNG" and mode in ("L;2", "L;4") and isinstance(value, int):
        top = (1 << int(mode[-1])) - 1
        image.info["transparency"] = (value & top) * 255 // top


def needs_low_bytes(image: ImageFile.ImageFile) -> bool:
    """Return whether the colours of an image with 16-bit samples depend on their low bytes, which Pillow drops; call it
    before `load`."""
    if image.mode not in ("RGB", "RGBA") or ";16" not in _raw_mode(image) or "a" in _raw_mode(image):
        return False
    return (image.format == "PNG" and "transparency" in image.info) or white_value(image) < 65535


def load_low_bytes(image: ImageFile.ImageFile) -> None:
    """Load the low bytes of 16-bit samples in place of the high bytes."""
    for index, tile in enumerate(image.tile):
        mode = _raw_mode(image)
        other = mode[:-1] + _OTHER_BYTE[mode[-1]]
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        changed = (other, *arguments[1:])
        image.tile[index] = tile._replace(args=changed if isinstance(tile.args, tuple) else other)
    image.load()


def white_value(image: Image.Image) -> int:
    """Return the largest value of the range of 16-bit samples: MaxSampleValue of a TIFF, or that of its bits."""
    top = (1 << min(tag(image, _BITS) or 16, 16)) - 1
    stated = tag(image, _MAX_SAMPLE) or 0
    return stated if 0 < stated < top else top


def is_inverted(image: Image.Image) -> bool:
    """Return whether 0 is white in the 16-bit samples; Pillow inverts only samples of 8 bits."""
    return tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO


def has_unused_alpha(image: Image.Image) -> bool:
    """Return whether the fourth channel is no alpha: all zero in a BMP, or undeclared in a TIFF."""
    if image.mode != "RGBA":
        return False
    if image.format in ("BMP", "DIB"):
        return not image.getchannel("A").getextrema()[1]
    return image.format == "TIFF" and tag(image, _EXTRA_SAMPLES) is None


def scaled(strips: tuple[Image.Image, ...], white: int, inverted: bool) -> Image.Image:
    """Scale values 0 to `white` to 8 bits, with alpha 0 for the transparent value. `strips` is a 16-bit grey image, or
    an image of high bytes and one of low bytes."""
    values: NDArray[np.int64] = np.asarray(strips[0]).astype(np.int64)
    if len(strips) == 2:
        values = 256 * values + np.asarray(strips[1])
    levels = (values.clip(0, white) * 255 + white // 2) // white
    image = Image.fromarray((255 - levels if inverted else levels).astype(np.uint8))
    transparent = strips[0].info.get("transparency")
    if isinstance(transparent, int | tuple):
        is_transparent = values == transparent
        if values.ndim == 3:
            is_transparent = is_transparent.all(-1)
        image = image.convert("LA" if image.mode == "L" else "RGBA")
        image.putalpha(Image.fromarray(np.where(is_transparent, 0, 255).astype(np.uint8)))
    return image
