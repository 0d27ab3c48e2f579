"""Pictures in every format and layout of samples, with profiles and orientations: four quarters, of which the last is
a ramp of grey."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pillow_heif
import pyvips
from PIL import Image

from tests.pipeline.media import made

pillow_heif.register_heif_opener()

HEIGHT, WIDTH = 16, 32
RAMP = np.linspace(0, 1, 16) ** 2
DEEP = {"rgb": np.array([[(0.79, 0.23, 0.19), (0.28, 0.7, 0.36)], [(0.24, 0.3, 0.75), (0, 0, 0)]])}
DEEP |= {"grey": np.array([[[0.22], [0.47]], [[0.8], [0.0]]]), "bit": np.array([[[0.0], [1.0]], [[1.0], [0.0]]])}
DEEP |= {"cmyk": np.array([[(0.1, 0.8, 0.7, 0.0), (0.7, 0.1, 0.7, 0.1)], [(0.8, 0.6, 0.0, 0.2), (0, 0, 0, 0)]])}
ALPHA = np.array([[1.0, 0.5], [0.0, 1.0]])


def quarters(corners: np.ndarray) -> np.ndarray:
    return corners.repeat(HEIGHT // 2, 0).repeat(WIDTH // 2, 1)


def samples_of(space: str) -> np.ndarray:
    """Samples 0 to 1 (height, width, channels) of the upright picture; CMYK has a ramp of black."""
    samples = quarters(DEEP[space])
    ramp = RAMP.round() if space == "bit" else RAMP
    samples[HEIGHT // 2 :, WIDTH // 2 :, -1 if space == "cmyk" else slice(None)] = (
        ramp if space == "cmyk" else ramp[:, None]
    )
    return samples


Encode = Callable[[np.ndarray, bytes | None, int], bytes]
"""Encode stored samples 0 to 1 (height, width, channels) with a profile, if any, and this orientation."""


@dataclass(frozen=True)
class Layout:
    """One way to store a picture. `alpha` is its kind: none, `full`, or `key` (a value is transparent)."""

    encode: Encode
    space: str = "rgb"
    alpha: str = ""
    tolerance: float = 2.0
    profiles: bool = True
    turns: bool = True
    is_exact: bool = True
    """Whether the picture is that which was encoded, within the tolerance."""
    error: str = ""
    """The code of the error row, if the project refuses such pictures."""

    def samples(self) -> np.ndarray:
        """The upright samples, with alpha as last channel."""
        samples = samples_of(self.space)
        if not self.alpha:
            return samples
        alpha = quarters(ALPHA) if self.alpha == "full" else quarters(ALPHA > 0).astype(float)
        return np.concatenate([samples, alpha[..., None]], axis=2)


def whole(samples: np.ndarray, top: int = 255) -> np.ndarray:
    return np.rint(samples * top).astype(np.uint8 if top <= 255 else np.uint16)


def pil(kind: str, mode: str, **options) -> Encode:
    """Written by Pillow with 8 bits or one per sample."""

    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        image = Image.fromarray(whole(samples if samples.shape[2] > 1 else samples[..., 0]))
        save = dict(options)
        if mode == "P":
            alpha = samples[..., 3] if samples.shape[2] == 4 else None
            image = image.convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            if alpha is not None:
                values = np.asarray(image).copy()
                values[alpha == 0] = 200
                palette = image.getpalette("RGB")
                image = Image.frombytes("P", image.size, values.tobytes())
                image.putpalette((palette + [0] * 768)[:768])
                save["transparency"] = 200
        elif mode in ("CMYK", "YCCK"):
            image = Image.fromarray(whole(samples), "CMYK")
        elif image.mode != mode:
            image = image.convert(mode)
        if profile:
            save["icc_profile"] = profile
        if orientation != 1:
            exif = Image.Exif()
            exif[0x0112] = orientation
            save["exif"] = exif if kind == "TIFF" else exif.tobytes()
        buffer = io.BytesIO()
        image.save(buffer, kind, **save)
        return buffer.getvalue()

    return encode


def ycck(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
    """A JPEG whose Adobe segment states YCCK."""
    ink = whole(samples)
    planes = np.asarray(Image.fromarray(ink[..., :3]).convert("YCbCr"))
    data = pil("JPEG", "CMYK", quality=98, subsampling=0)(
        np.dstack([255 - planes, ink[..., 3]]) / 255.0, profile, orientation
    )
    at = data.index(b"Adobe") + 11
    return data[:at] + b"\x02" + data[at + 1 :]


def vips(suffix: str, bits: int, **options) -> Encode:
    """Written by libvips with 8 or 16 bits per sample."""

    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        values = np.ascontiguousarray(whole(samples, (1 << bits) - 1))
        image = pyvips.Image.new_from_array(values)
        names = {8: ("b-w", "srgb"), 16: ("grey16", "rgb16")}[bits]
        image = image.copy(interpretation=names[values.shape[2] > 2])
        if profile:
            image.set_type(pyvips.GValue.blob_type, "icc-profile-data", profile)
        if orientation != 1:
            image.set_type(pyvips.GValue.gint_type, "orientation", orientation)
        return image.write_to_buffer(suffix, **options)

    return encode


def tiff(bits: int, photometric: int, top: int | None = None) -> Encode:
    """An uncompressed TIFF of grey; `top` is its MaxSampleValue."""

    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        values = samples[..., 0] if photometric else 1 - samples[..., 0]
        tags = {274: [orientation]} | ({281: [top]} if top else {})
        return made.tiff(whole(values, top or (1 << bits) - 1).astype(np.uint16), bits, photometric, tags=tags)

    return encode


def colour_tiff(bits: int, extra: int, **options) -> Encode:
    """An uncompressed TIFF of RGB with alpha; its colours are premultiplied if `extra`, its ExtraSamples, is 1."""

    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        alpha = samples[..., 3:]
        values = np.dstack([samples[..., :3] * (alpha if extra == 1 else 1), alpha])
        return made.tiff(whole(values, (1 << bits) - 1), bits, 2, tags={274: [orientation], 338: [extra]}, **options)

    return encode


def png16(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
    """An RGB PNG of 16 bits with a transparent colour."""
    values = whole(samples[..., :3], 65535)
    values[samples[..., 3] == 0] = key = (17, 4242, 65000)
    return made.png(values, 16, made.chunk(b"tRNS", struct.pack(">3H", *key)))


def netpbm(top: int) -> Encode:
    """Grey with this maximum."""

    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        values = whole(samples[..., 0], top).astype(">u2" if top > 255 else "u1")
        return b"P5 %d %d %d\n" % (values.shape[1], values.shape[0], top) + values.tobytes()

    return encode


def bmp(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
    values = whole(samples)
    if profile:
        return made.bmp_v5(values, profile)
    return made.bmp(values) if values.shape[2] == 4 else pil("BMP", "RGB")(samples, None, 1)


def jpeg_2000(mode: str) -> Encode:
    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        data = pil("JPEG2000", mode)(samples, None, 1)
        return made.jp2_with(data, profile) if profile else data

    return encode


def deep_jpeg_2000(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(whole(samples[..., 0], 65535)).save(buffer, "JPEG2000")
    return buffer.getvalue()


def floats(kind: str) -> Encode:
    def encode(samples: np.ndarray, profile: bytes | None, orientation: int) -> bytes:
        values = samples[..., 0].astype(np.float32)
        if kind == "PFM":
            return b"Pf\n%d %d\n-1.0\n" % values.shape[::-1] + values[::-1].tobytes()
        buffer = io.BytesIO()
        Image.fromarray(values).save(buffer, kind)
        return buffer.getvalue()

    return encode


GOOD = {"quality": 98, "subsampling": 0}
FINE = {"quality": 100, "subsampling": "4:4:4"}
PLAIN = {"profiles": False, "turns": False}
LAYOUTS: dict[str, Layout] = {
    "jpeg-l": Layout(pil("JPEG", "L", quality=98), "grey", tolerance=3),
    "jpeg-rgb": Layout(pil("JPEG", "RGB", **GOOD), tolerance=4),
    "jpeg-420": Layout(pil("JPEG", "RGB", quality=90), is_exact=False),
    "jpeg-progressive": Layout(pil("JPEG", "RGB", progressive=True, **GOOD), tolerance=4),
    "jpeg-cmyk": Layout(pil("JPEG", "CMYK", **GOOD), "cmyk", tolerance=4),
    "jpeg-ycck": Layout(ycck, "cmyk", tolerance=5),
    "png-1": Layout(pil("PNG", "1"), "bit"),
    "png-l": Layout(pil("PNG", "L"), "grey"),
    "png-la": Layout(pil("PNG", "LA"), "grey", "full"),
    "png-p": Layout(pil("PNG", "P")),
    "png-p-key": Layout(pil("PNG", "P"), alpha="key"),
    "png-rgb": Layout(pil("PNG", "RGB")),
    "png-rgba": Layout(pil("PNG", "RGBA"), alpha="full"),
    "png-l16": Layout(vips(".png", 16), "grey", tolerance=3),
    "png-la16": Layout(vips(".png", 16), "grey", "full", tolerance=3),
    "png-rgb16": Layout(vips(".png", 16)),
    "png-rgba16": Layout(vips(".png", 16), alpha="full"),
    "png-rgba16-interlaced": Layout(vips(".png", 16, interlace=True), alpha="full"),
    "png-rgb16-key": Layout(png16, alpha="key", **PLAIN),
    "webp-lossy": Layout(pil("WEBP", "RGB", quality=90), is_exact=False),
    "webp-lossy-rgba": Layout(pil("WEBP", "RGBA", quality=90), alpha="full", is_exact=False),
    "webp-rgb": Layout(pil("WEBP", "RGB", lossless=True)),
    "webp-rgba": Layout(pil("WEBP", "RGBA", lossless=True, exact=True), alpha="full"),
    "tiff-1": Layout(pil("TIFF", "1"), "bit"),
    "tiff-l": Layout(pil("TIFF", "L"), "grey"),
    "tiff-la": Layout(pil("TIFF", "LA"), "grey", "full"),
    "tiff-p": Layout(pil("TIFF", "P")),
    "tiff-rgb": Layout(pil("TIFF", "RGB", compression="tiff_lzw")),
    "tiff-rgba": Layout(pil("TIFF", "RGBA"), alpha="full"),
    "tiff-cmyk": Layout(pil("TIFF", "CMYK"), "cmyk"),
    "tiff-l16": Layout(vips(".tif", 16), "grey", tolerance=3),
    "tiff-rgb16": Layout(vips(".tif", 16, compression="deflate")),
    "tiff-rgba16": Layout(vips(".tif", 16), alpha="full"),
    "tiff-tiled": Layout(vips(".tif", 16, tile=True, tile_width=16, tile_height=16, compression="lzw")),
    "tiff-webp": Layout(vips(".tif", 8, compression="webp"), error="broken_image", **PLAIN),
    "tiff-rgba-planes": Layout(colour_tiff(8, 2, separate=True), alpha="full", profiles=False),
    "tiff-rgba-associated": Layout(colour_tiff(8, 1), alpha="full", profiles=False),
    "tiff-rgba16-associated": Layout(colour_tiff(16, 1, order=">"), alpha="full", profiles=False),
    "tiff-rgb16-planes": Layout(
        lambda samples, _, turn: made.tiff(whole(samples, 65535), 16, 2, tags={274: [turn]}, separate=True),
        profiles=False,
    ),
    "tiff-l-white-is-zero": Layout(tiff(8, 0), "grey", profiles=False),
    "tiff-l16-white-is-zero": Layout(tiff(16, 0), "grey", profiles=False),
    "tiff-l12-in-16": Layout(tiff(16, 1, 4095), "grey", profiles=False),
    "tiff-l12-packed": Layout(tiff(12, 1), "grey", profiles=False),
    "tiff-la16": Layout(vips(".tif", 16), "grey", "full", error="not_an_image"),
    "tiff-f": Layout(floats("TIFF"), "grey", error="unsupported_image", **PLAIN),
    "gif-p": Layout(pil("GIF", "P"), **PLAIN),
    "gif-interlaced": Layout(pil("GIF", "P", interlace=1), **PLAIN),
    "gif-p-key": Layout(pil("GIF", "P"), alpha="key", **PLAIN),
    "bmp-1": Layout(pil("BMP", "1"), "bit", **PLAIN),
    "bmp-l": Layout(pil("BMP", "L"), "grey", **PLAIN),
    "bmp-p": Layout(pil("BMP", "P"), **PLAIN),
    "bmp-rgb": Layout(bmp, turns=False),
    "bmp-rgba": Layout(bmp, alpha="full", **PLAIN),
    "avif-rgb": Layout(pil("AVIF", "RGB", **FINE), tolerance=4),
    "avif-rgba": Layout(pil("AVIF", "RGBA", **FINE), alpha="full", tolerance=4),
    "avif-l": Layout(vips(".avif", 8, Q=100), "grey", profiles=False),
    "avif-la": Layout(vips(".avif", 8, Q=100), "grey", "full", profiles=False),
    "avif-l10": Layout(vips(".avif", 16, Q=100, bitdepth=10), "grey", profiles=False),
    "avif-rgb12": Layout(vips(".avif", 16, Q=100, bitdepth=12, subsample_mode="off"), tolerance=4),
    "avif-rgba10": Layout(vips(".avif", 16, Q=100, bitdepth=10, subsample_mode="off"), alpha="full", tolerance=4),
    "heif-l": Layout(pil("HEIF", "L", quality=-1), "grey"),
    "heif-rgb": Layout(pil("HEIF", "RGB", quality=-1, chroma=444)),
    "heif-rgba": Layout(pil("HEIF", "RGBA", quality=-1, chroma=444), alpha="full"),
    "jp2-l": Layout(jpeg_2000("L"), "grey", turns=False),
    "jp2-rgb": Layout(jpeg_2000("RGB"), turns=False),
    "jp2-rgba": Layout(jpeg_2000("RGBA"), alpha="full", turns=False),
    "jp2-l16": Layout(deep_jpeg_2000, "grey", **PLAIN),
    "pbm": Layout(pil("PPM", "1"), "bit", **PLAIN),
    "pgm": Layout(netpbm(255), "grey", **PLAIN),
    "pgm-12": Layout(netpbm(4095), "grey", **PLAIN),
    "pgm-16": Layout(netpbm(65535), "grey", **PLAIN),
    "ppm": Layout(pil("PPM", "RGB"), **PLAIN),
    "pfm": Layout(floats("PFM"), "grey", error="unsupported_image", **PLAIN),
    "ico": Layout(pil("ICO", "RGB"), error="not_an_image", **PLAIN),
}
PROFILES = {"rgb": ("srgb", "p3", "adobe", "grey"), "grey": ("grey", "p3"), "bit": ("grey",), "cmyk": ("cmyk", "p3")}


def cases() -> list[tuple[str, str, int]]:
    """Every picture: its layout, its profile or `none`, and its orientation."""
    return [
        (name, profile, orientation)
        for name, layout in LAYOUTS.items()
        for profile in ("none", *(PROFILES[layout.space] if layout.profiles else ()))
        for orientation in (range(1, 9) if layout.turns else (1,))
    ]
