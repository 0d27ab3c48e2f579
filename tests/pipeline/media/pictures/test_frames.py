"""First frames that cover a part of the canvas, and orientations that only XMP states: as in browsers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from pipeline.media.pixels import decode
from tests.pipeline.media.test_image_decoding import saved

WHITE, RED, BLUE = [255] * 3, [255, 0, 0], [0, 0, 255]


def gif(transparency: int | None, corner: tuple[int, int]) -> bytes:
    """A GIF of 32 x 16 with a blue frame of 16 x 8, whose background colour is red."""
    image = Image.new("P", (16, 8), 2)
    image.putpalette([255, 255, 0, *RED, *BLUE, 0, 255, 0])
    options = {} if transparency is None else {"transparency": transparency}
    data = bytearray(saved(image, "GIF", optimize=False, **options))
    data[6:10], data[11] = struct.pack("<HH", 32, 16), 1
    at = data.index(b"\x2c", 13 + 3 * (2 << (data[10] & 7)))
    data[at + 1 : at + 5] = struct.pack("<HH", *corner)
    return bytes(data)


@pytest.mark.parametrize("transparency", [None, 0, 3])
@pytest.mark.parametrize("corner", [(8, 4), (0, 0), (16, 8)])
def test_a_gif_is_white_where_its_first_frame_is_not(transparency: int | None, corner: tuple[int, int]) -> None:
    wanted = np.full((16, 32, 3), 255)
    wanted[corner[1] : corner[1] + 8, corner[0] : corner[0] + 16] = BLUE
    assert np.array_equal(decode(gif(transparency, corner), 10_000), wanted)


def test_a_transparent_frame_of_a_gif_is_white() -> None:
    assert (decode(gif(2, (8, 4)), 10_000) == 255).all()


@pytest.mark.parametrize("lossless", [True, False])
def test_an_animated_webp_without_alpha_is_white_where_its_first_frame_is_not(lossless: bool) -> None:
    frames = [Image.new("RGBA", (32, 16)), Image.new("RGBA", (32, 16), "red")]
    frames[0].paste((0, 0, 255, 255), (8, 4, 24, 12))
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=lossless)
    without_flag = data[:20] + bytes([data[20] & ~0x10]) + data[21:]
    for encoded in (data, without_flag):
        found = decode(encoded, 10_000).astype(int)
        assert found[0, 0].tolist() == found[15, 31].tolist() == WHITE
        assert np.abs(found[8, 16] - BLUE).max() <= 4


@pytest.mark.parametrize("exif", [None, 1, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_that_of_exif_and_not_of_xmp(kind: str, exif: int | None) -> None:
    text = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    options: dict[str, object] = {"xmp": text.encode()}
    if kind == "PNG":
        options = {"pnginfo": PngImagePlugin.PngInfo()}
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", text)
    if kind == "TIFF":
        options = {"tiffinfo": {700: text.encode()} | ({274: exif} if exif else {})}
    elif exif:
        tags = Image.Exif()
        tags[ExifTags.Base.Orientation] = exif
        options["exif"] = tags.tobytes()
    data = saved(Image.new("RGB", (32, 16), "red"), kind, **options)
    assert decode(data, 10_000).shape == ((32, 16, 3) if exif == 8 else (16, 32, 3))
