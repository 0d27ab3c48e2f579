"""Decodes one image to uint8 RGB pixels; imports only what the process `pipeline.media.video.child` needs."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from pipeline.media import repairs, samples
from pipeline.media.colour import to_rgb
from pipeline.media.named_spaces import BT2020, PRIMARIES, named_space, profile_of
from pipeline.media.profiles import embedded_profile

# Pillow logs some damage as errors; the row's error contains the reason.
logging.getLogger("PIL").setLevel(logging.CRITICAL)

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF", "JXL")
"""Accepted image formats; formats that run interpreters or embed files (EPS, PDF, ICO, …) are left out."""
PLUGINS = {"HEIF": ("pillow_heif", "HEIC", "pillow-heif"), "JXL": ("pillow_jxl", "JPEG XL", "pillow-jxl-plugin")}
"""Formats that Pillow reads with the plugin of another package: its module, their name, and its name in the index."""
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_JPEG_XL = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")

MAX_ASPECT = 200
"""Maximum ratio of the sides: processors that resize the shorter side would need gigabytes. Qwen has this limit too."""
DRAFT_FACTOR = 2
"""A JPEG to downscale is decoded at 1/2, 1/4 or 1/8 of its size, but never below this multiple of the final size."""
GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L")
PNG_GREY_WITH_ALPHA = 4
"""Colour type of PNGs that Pillow reads as RGBA if they have 16 bits."""
XMP_KEYS = ("xmp", "XML:com.adobe.xmp")
"""Keys of metadata in which Pillow finds an orientation that browsers ignore."""
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


def decode(
    data: bytes | bytearray | memoryview, max_pixels: int, max_side_px: int | None = None, convert_to_srgb: bool = True
) -> NDArray[np.uint8]:
    """Decode one image to uint8 RGB (height, width, 3): EXIF orientation applied, alpha composited on white, colours of
    an embedded profile converted to sRGB if `convert_to_srgb`, first frame of an animation, downscaled if its longer
    side exceeds `max_side_px`; damage that `repairs` leaves out is tolerated. MediaError: `not_an_image`,
    `image_too_large` (known before any pixel is decoded), `broken_image`, `unsupported_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _decode(data, max_pixels, max_side_px, convert_to_srgb)
        except MediaError as error:
            if error.code not in ("not_an_image", "broken_image"):
                raise
            damage = error
        try:
            repaired = (_decode(one, max_pixels, max_side_px, convert_to_srgb) for one in repairs.variants(data))
            first = next(repaired, None)
            if first is not None and all(np.array_equal(first, other) for other in repaired):
                return first
        except MediaError:
            raise damage from None
        raise damage


def _decode(
    data: bytes | bytearray | memoryview, max_pixels: int, max_side_px: int | None, convert_to_srgb: bool
) -> NDArray[np.uint8]:
    """Decode an undamaged image; errors as for `decode`."""
    image = _open(data, max_pixels)
    name = image.format
    try:
        stored = image.size
        size = fitting(*stored, max_side_px)
        if size != stored and name in ("JPEG", "MPO"):
            image.draft(None, (DRAFT_FACTOR * size[0], DRAFT_FACTOR * size[1]))
        samples.scale_transparency(image)
        low_bytes = _open(data, max_pixels) if samples.needs_low_bytes(image) else None
        for key in XMP_KEYS:
            image.info.pop(key, None)
        box = image.tile[0].extents if name == "GIF" and image.tile else None
        image.load()
        if low_bytes is not None:
            samples.load_low_bytes(low_bytes)
        is_drafted = image.size != stored and name in ("JPEG", "MPO")
        grey = name == "PNG" and data[25] == PNG_GREY_WITH_ALPHA
        profile, hdr = _colours_of(image, data, grey) if convert_to_srgb else (None, None)
        upright = to_rgb(image if box is None else _only(image, box), profile, low_bytes, grey, hdr)
        turn = _orientation(image)  # after `load`, which already applies the orientation of a TIFF
        del image, low_bytes  # frees its pixels before further copies are made
        if turn in _TURNS:
            upright = upright.transpose(_TURNS[turn])
    except MemoryError:
        raise
    except samples.UndefinedRange as error:
        raise MediaError("unsupported_image", str(error)) from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, EOFError, …
        raise MediaError("broken_image", f"the {name} image cannot be decoded: {error}") from None
    if is_drafted:
        final_size = size[::-1] if turn >= 5 else size  # orientations from 5 on swap width and height
    else:
        final_size = fitting(*upright.size, max_side_px)
    if upright.size != final_size:
        upright = upright.resize(final_size, Image.Resampling.LANCZOS)
    return np.asarray(upright)


def _only(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """Return an image that is clear outside of `box`, the first frame of a GIF, where Pillow has any colour."""
    if box == (0, 0, *image.size):
        return image
    canvas = Image.new("RGBA", image.size)
    canvas.paste(image.crop(box).convert("RGBA"), box)
    return canvas


def _colours_of(
    image: ImageFile.ImageFile, data: bytes | bytearray | memoryview, grey: bool
) -> tuple[bytes | None, int | None]:
    """Return the profile of an image, or that of its named colour space, and its transfer function if it is HDR."""
    space = named_space(image, data)
    if space is None:
        return embedded_profile(image, data), None
    if space.hdr is None:
        return profile_of(space, grey or image.mode in GREY_MODES), None
    if space.primaries != PRIMARIES[BT2020]:
        raise samples.UndefinedRange("HDR in another colour space than BT.2020")
    return None, space.hdr


def fitting(width: int, height: int, max_side_px: int | None) -> tuple[int, int]:
    """Return width and height of an image after limiting its longer side to `max_side_px`."""
    longer = max(width, height)
    if max_side_px is None or longer <= max_side_px:
        return width, height
    scale = max_side_px / longer
    return max(1, round(width * scale)), max(1, round(height * scale))


def _open(data: bytes | bytearray | memoryview, max_pixels: int) -> ImageFile.ImageFile:
    """Read the header and check the size against `max_pixels`, which replaces Pillow's own pixel limit."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        image = Image.open(io.BytesIO(repairs.with_alpha(data)), formats=installed_formats())
        if samples.is_misread(image):
            TiffImagePlugin.READ_LIBTIFF = True
            image = Image.open(io.BytesIO(data), formats=["TIFF"])
    except UnidentifiedImageError:
        if (needed := _needed_plugin(bytes(data[:64]))) is not None:
            _, name, package = PLUGINS[needed]
            message = f"a {name} image; install the package {package} where images are decoded, or convert the image"
            raise MediaError("unsupported_image", message) from None
        raise MediaError("not_an_image", f"{len(data)} bytes that are no image of a known format") from None
    except MemoryError:
        raise
    except Exception as error:  # a known format with an invalid header
        raise MediaError("broken_image", f"the image's header cannot be read: {error}") from None
    finally:
        Image.MAX_IMAGE_PIXELS, TiffImagePlugin.READ_LIBTIFF = limit, False
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
    _register()
    return [name for name in FORMATS if name in Image.OPEN]


@lru_cache(maxsize=1)
def _register() -> None:
    """Register the plugins that are installed, and layouts of TIFF."""
    samples.register_layouts()
    for module, _, _ in PLUGINS.values():
        with contextlib.suppress(ImportError):
            plugin = importlib.import_module(module)  # the plugin for JPEG XL registers itself
            getattr(plugin, "register_heif_opener", lambda: None)()


def _needed_plugin(head: bytes) -> str | None:
    """Return the format of `PLUGINS` that the first bytes of a file have, if its plugin is not installed."""
    name = "JXL" if head.startswith(_JPEG_XL) else None
    if head[4:8] == b"ftyp":
        end = min(int.from_bytes(head[:4], "big"), len(head))
        if _HEIC_BRANDS & {head[8:12], *(head[at : at + 4] for at in range(16, end, 4))}:
            name = "HEIF"
    return None if name in Image.OPEN else name


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or damaged."""
    try:
        turn = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1
    return turn if turn in _TURNS else 1
