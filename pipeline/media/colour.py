"""Converts decoded images of all modes to 8-bit sRGB: embedded profiles, and alpha over white."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from pipeline.media.samples import UndefinedRange, has_unused_alpha, is_inverted, scaled, white_value
from pipeline.media.video.colour import tone_mapped

STRIP_ROWS = 512
"""Rows of pixels per conversion step, so that converting needs no second copy of the whole image."""
MAX_PROFILE_BYTES = 4 * 1024 * 1024
"""Maximum size of a colour profile; an image with a larger one is read as if it had none."""
MAX_IDENTITY_ERROR = 2
"""A profile is sRGB if no colour changes by more than this value of 255; most images have such a profile."""

_SPACES = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGB", "CMYK": "CMYK"}
"""The colour space of profiles for each mode; a profile of another space is ignored, as browsers do."""
_SUPPORTED = ("L", "LA", "RGB", "RGBA", "CMYK", "LAB")


def to_rgb(
    image: Image.Image,
    profile: bytes | None,
    low_bytes: Image.Image | None = None,
    grey: bool = False,
    hdr: int | None = None,
) -> Image.Image:
    """Convert a loaded image to RGB with alpha composited on white, and from the space of `profile` to sRGB.
    `low_bytes` are those of 16-bit samples; `grey` marks grey with alpha in the mode RGBA; pixels of BT.2020 with the
    transfer function `hdr` are tone-mapped. UndefinedRange for pixels without a defined range or colour."""
    if image.mode in ("I", "F", "HSV") and not (image.mode == "I" and image.format in ("PNG", "PPM")):
        raise UndefinedRange(f"pixels of mode {image.mode!r} ({image.format}) have no agreed range or colour")
    if profile is not None and len(profile) > MAX_PROFILE_BYTES:
        profile = None
    if low_bytes is not None or image.mode.startswith("I"):
        white, inverted = white_value(image), is_inverted(image)
        images = (image,) if low_bytes is None else (image, low_bytes)
        return _by_strips(images, lambda *strips: _flat(scaled(strips, white, inverted), profile, hdr))
    if grey:
        return _by_strips((image,), lambda strip: _flat(strip.convert("LA"), profile, hdr))
    changes = hdr is not None or (profile and _transform(profile, "RGB"))
    if image.mode == "RGB" and not image.has_transparency_data and not changes:
        return image
    is_opaque = has_unused_alpha(image)
    return _by_strips((image,), lambda strip: _flat(_plain(strip, is_opaque), profile, hdr))


def _by_strips(images: tuple[Image.Image, ...], convert: Callable[..., Image.Image]) -> Image.Image:
    """Apply a per-pixel conversion of images of one size to RGB in strips of `STRIP_ROWS` rows."""
    width, height = images[0].size
    if height <= STRIP_ROWS:
        return convert(*images)
    converted = Image.new("RGB", (width, height))
    for top in range(0, height, STRIP_ROWS):
        box = (0, top, width, min(top + STRIP_ROWS, height))
        converted.paste(convert(*(image.crop(box) for image in images)), box)
    return converted


def _flat(image: Image.Image, profile: bytes | None, hdr: int | None) -> Image.Image:
    """Convert an image of the modes `_SUPPORTED` to RGB in sRGB, alpha composited on white."""
    image = _to_srgb(image, profile)
    if hdr is not None:
        alpha = image.getchannel("A") if image.mode == "RGBA" else None
        image = Image.fromarray(tone_mapped(np.asarray(image.convert("RGB")), hdr))
        if alpha is not None:
            image.putalpha(alpha)
    if image.mode == "RGB":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _plain(image: Image.Image, is_opaque: bool) -> Image.Image:
    """Convert 8-bit modes to those of `_SUPPORTED`."""
    if is_opaque:
        return image.convert("RGB")
    if image.has_transparency_data:
        return image.convert("LA" if image.mode in ("1", "L", "LA", "La") else "RGBA")
    if image.mode in _SUPPORTED:
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image of the modes `_SUPPORTED` to RGB or RGBA in sRGB."""
    if image.mode == "LA":
        rgb = _to_srgb(image.getchannel("L"), profile)
        rgb.putalpha(image.getchannel("A"))
        return rgb
    transform = _lab_transform() if image.mode == "LAB" else profile and _transform(profile, image.mode)
    if transform and image.mode == "L":
        levels = transform.apply(Image.frombytes("L", (256, 1), bytes(range(256))))
        return Image.merge("RGB", [image.point(channel.tobytes()) for channel in levels.split()])
    if transform:
        return transform.apply(image)
    return image if image.mode == "RGBA" else image.convert("RGB")


@lru_cache(maxsize=8)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from a profile to sRGB; None if the profile is sRGB, damaged, or for another mode."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _SPACES[mode]:
            return None
        transform = _to_srgb_from(source, mode)
        if _SPACES[mode] == "RGB" and _keeps_colours(_to_srgb_from(source, "RGB")):
            return None
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    return transform


def _to_srgb_from(source: Any, mode: str) -> ImageCms.ImageCmsTransform:
    """Return the perceptual transform from a profile to sRGB, without black-point compensation, as in browsers."""
    return ImageCms.buildTransform(
        source,
        _srgb_profile(),
        mode,
        "RGBA" if mode == "RGBA" else "RGB",
        ImageCms.Intent.PERCEPTUAL,
        # The optimisation of grey interpolates between 33 values, which are too few for dark linear grey.
        ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE,
    )


@lru_cache(maxsize=1)
def _srgb_profile() -> ImageCms.ImageCmsProfile:
    """Return sRGB as a profile of version 2; lcms always compensates the black point for profiles of version 4."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return ImageCms.ImageCmsProfile(io.BytesIO(data[:8] + b"\x02\x40\0\0" + data[12:]))


@lru_cache(maxsize=1)
def _lab_transform() -> ImageCms.ImageCmsTransform:
    return _to_srgb_from(ImageCms.createProfile("LAB"), "LAB")


def _keeps_colours(transform: ImageCms.ImageCmsTransform) -> bool:
    """Return whether a transform changes no colour of a grid by more than `MAX_IDENTITY_ERROR`."""
    levels = np.linspace(0, 255, 18).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    changed = np.asarray(transform.apply(Image.fromarray(grid)))
    return bool(np.abs(changed.astype(int) - grid).max() <= MAX_IDENTITY_ERROR)
