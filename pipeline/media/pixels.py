"""Decodes one image to uint8 RGB pixels; imports only what the process `pipeline.media.video.child` needs."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

# Pillow logs some damage as errors; the row's error contains the reason.
logging.getLogger("PIL").setLevel(logging.CRITICAL)

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Accepted image formats; formats that run interpreters or embed files (EPS, PDF, ICO, …) are left out."""

MAX_ASPECT = 200
"""Maximum ratio of the sides: processors that resize the shorter side would need gigabytes. Qwen has this limit too."""
DRAFT_FACTOR = 2
"""A JPEG to downscale is decoded at 1/2, 1/4 or 1/8 of its size, but never below this multiple of the final size."""
STRIP_ROWS = 512
"""Rows of pixels per conversion step, so that converting needs no second copy of the whole image."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that undoes each EXIF orientation (Exif 2.3, tag 0x0112)."""


class MediaError(ValueError):
    """An image or video cannot be decoded: `code` is the row's error code, `message` the readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def decode(data: bytes | bytearray | memoryview, max_pixels: int, max_side_px: int | None = None) -> NDArray[np.uint8]:
    """Decode one image to uint8 RGB (height, width, 3): EXIF orientation applied, alpha composited on white, first
    frame of an animation, downscaled if its longer side exceeds `max_side_px`. MediaError: `not_an_image`,
    `image_too_large` (known before any pixel is decoded), `broken_image`, `unsupported_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data, max_pixels)
        name = image.format
        try:
            stored = image.size
            size = fitting(*stored, max_side_px)
            if size != stored and name in ("JPEG", "MPO"):
                image.draft(None, (DRAFT_FACTOR * size[0], DRAFT_FACTOR * size[1]))
            image.load()
            upright, is_drafted = _to_rgb(image), image.size != stored and name in ("JPEG", "MPO")
            turn = _orientation(image)  # after `load`, which already applies the orientation of a TIFF
            del image  # frees its pixels before further copies are made
            if turn in _TURNS:
                upright = upright.transpose(_TURNS[turn])
        except (MediaError, MemoryError):
            raise
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, EOFError, …
            raise MediaError("broken_image", f"the {name} image cannot be decoded: {error}") from None
    if is_drafted:
        final_size = size[::-1] if turn >= 5 else size  # orientations from 5 on swap width and height
    else:
        final_size = fitting(*upright.size, max_side_px)
    if upright.size != final_size:
        upright = upright.resize(final_size, Image.Resampling.LANCZOS)
    return np.asarray(upright)


def fitting(width: int, height: int, max_side_px: int | None) -> tuple[int, int]:
    """Return width and height of an image after limiting its longer side to `max_side_px`."""
    longer = max(width, height)
    if max_side_px is None or longer <= max_side_px:
        return width, height
    scale = max_side_px / longer
    return max(1, round(width * scale)), max(1, round(height * scale))


def _open(data: bytes | bytearray | memoryview, max_pixels: int) -> Image.Image:
    """Read the header and check the size against `max_pixels`, which replaces Pillow's own pixel limit."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        image = Image.open(io.BytesIO(data), formats=installed_formats())
    except UnidentifiedImageError:
        raise MediaError("not_an_image", f"{len(data)} bytes that are no image of a known format") from None
    except MemoryError:
        raise
    except Exception as error:  # a known format with an invalid header
        raise MediaError("broken_image", f"the image's header cannot be read: {error}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise MediaError(
            "image_too_large",
            f"{image.width} x {image.height} pixels are more than source.max_image_pixels ({max_pixels})",
        )
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise MediaError(
            "unsupported_image", f"sides of {image.width} and {image.height} pixels are more than {MAX_ASPECT} to 1"
        )
    return image


def installed_formats() -> list[str]:
    """Return the formats of `FORMATS` that this build of Pillow supports."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert the loaded image to RGB, alpha composited on white; MediaError if its range or colour is undefined."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _by_strips(image, _from_16_bits)
    if image.mode in ("I", "F", "LAB", "HSV"):
        message = f"pixels of mode {image.mode!r} ({image.format}) have no agreed range or colour"
        raise MediaError("unsupported_image", message)
    if image.has_transparency_data:
        return _by_strips(image, _over_white)
    return image if image.mode == "RGB" else _by_strips(image, lambda strip: strip.convert("RGB"))


def _by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Apply a per-pixel conversion to RGB in strips of `STRIP_ROWS` rows."""
    if image.height <= STRIP_ROWS:
        return convert(image)
    converted = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP_ROWS):
        box = (0, top, image.width, min(top + STRIP_ROWS, image.height))
        converted.paste(convert(image.crop(box)), box)
    return converted


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Scale grey values 0 to 65535 to 0 to 255; Pillow's own conversion clips values above 255."""
    grey = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or damaged."""
    try:
        turn = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1
    return turn if turn in _TURNS else 1
