"""Damage that other readers tolerate, while all pixels are there."""

from __future__ import annotations

import contextlib
import zlib

import numpy as np
import pytest
from PIL import Image

from pipeline.media import repairs
from pipeline.media.pixels import MediaError, decode
from tests.pipeline.media import made
from tests.pipeline.media.test_image_decoding import saved

LIMIT = 10_000
PICTURE = np.random.default_rng(0).integers(0, 256, (20, 28, 3), np.uint8)
SMOOTH = np.asarray(Image.fromarray(PICTURE[:4, :5]).resize((28, 20)))
TEXT = b"k\0\0" + zlib.compress(b"x" * 2_000_000)
BODIES = {b"iCCP": b"k\0\0" + zlib.compress(b"x" * 2_000_000), b"zTXt": TEXT, b"iTXt": b"k\0\1\0\0\0" + TEXT[3:]}
ORIENTATION = bytes.fromhex("4d4d002a00000008000101120003000000010003000000000000")


def code_of(data: bytes) -> str:
    with pytest.raises(MediaError) as caught:
        decode(data, LIMIT)
    return caught.value.code


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", BODIES)
def test_texts_and_profiles_beyond_pillows_limits_are_left_out(kind: bytes, is_before: bool) -> None:
    large = made.chunk(kind, BODIES[kind])
    data = made.png(PICTURE, 8, *([large] if is_before else []), after=b"" if is_before else large)
    assert np.array_equal(decode(data, LIMIT), PICTURE)


def test_many_texts_are_left_out_and_orientation_and_transparency_stay() -> None:
    texts = [made.chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900_000)))] * 80
    exif, transparent = made.chunk(b"eXIf", ORIENTATION), made.chunk(b"tRNS", bytes((0, 1, 0, 2, 0, 3)))
    picture = PICTURE.copy()
    picture[0, 0] = (1, 2, 3)
    found = decode(made.png(picture, 8, exif, transparent, *texts), LIMIT)
    picture[0, 0] = 255
    assert np.array_equal(found, picture[::-1, ::-1])


@pytest.mark.parametrize("kind", [b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tRNS", b"tEXt", b"eXIf", b"iCCP", b"acTL"])
@pytest.mark.parametrize("has_right_checksum", [False, True])
def test_damaged_ancillary_chunks_are_left_out(kind: bytes, has_right_checksum: bool) -> None:
    damaged = made.chunk(kind, b"\0")
    damaged = damaged if has_right_checksum else damaged[:-4] + b"\0\0\0\0"
    assert np.array_equal(decode(made.png(PICTURE, 8, damaged), LIMIT), PICTURE)


def test_damaged_critical_chunks_stay_errors() -> None:
    data = bytearray(made.png(PICTURE, 8))
    data[29] ^= 1  # the checksum of IHDR
    assert code_of(bytes(data)) == "not_an_image"


def test_a_png_may_end_after_its_pixels() -> None:
    data = made.png(PICTURE, 8, made.chunk(b"zTXt", TEXT))
    assert np.array_equal(decode(data[:-12], LIMIT), PICTURE)
    assert code_of(data[:-200]) in ("broken_image", "not_an_image")


JPEGS = [
    {},
    {"progressive": True},
    {"restart_marker_blocks": 2},
    {"progressive": True, "restart_marker_blocks": 3},
    {"subsampling": 0, "optimize": True},
]


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("end", [b"", b"\xff", b"\0\0\0"])
def test_a_jpeg_may_end_without_its_marker(options: dict, mode: str, end: bytes) -> None:
    data = saved(Image.fromarray(PICTURE).convert(mode), "JPEG", **options)
    assert np.array_equal(decode(data[:-2] + end, LIMIT), decode(data, LIMIT))


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize(
    "picture", [PICTURE, SMOOTH, np.full((20, 28, 3), 255, np.uint8)], ids=["noise", "smooth", "flat"]
)
def test_no_jpeg_that_ends_early_has_other_pixels(options: dict, picture: np.ndarray) -> None:
    data = saved(Image.fromarray(picture), "JPEG", **options)
    whole = decode(data, LIMIT)
    for num_missing in range(3, len(data) - data.index(b"\xff\xda")):
        with contextlib.suppress(MediaError):
            assert np.array_equal(decode(data[:-num_missing], LIMIT), whole), num_missing


def test_a_progressive_jpeg_without_its_last_scan_is_broken() -> None:
    data = saved(Image.fromarray(PICTURE), "JPEG", progressive=True)
    assert code_of(data[: data.rindex(b"\xff\xda")]) == "broken_image"


@pytest.mark.parametrize("options", [{}, {"no_jp2": True}])
def test_a_jpeg_2000_may_end_without_its_marker(options: dict) -> None:
    data = saved(Image.fromarray(PICTURE), "JPEG2000", **options)
    assert np.array_equal(decode(data[:-2], LIMIT), PICTURE)
    assert np.array_equal(decode(data[:-1], LIMIT), PICTURE)
    assert code_of(data[:-4]) == "broken_image"


@pytest.mark.parametrize(("name", "value"), [("MAX_PNG_CHUNKS", 2), ("MAX_JPEG_SEGMENTS", 3)])
def test_repairs_stop_at_their_bounds(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(repairs, name, value)
    data = made.png(PICTURE, 8, made.chunk(b"zTXt", TEXT))
    if "JPEG" in name:
        data = saved(Image.fromarray(PICTURE), "JPEG")[:-2]
    assert code_of(data) == "broken_image"
