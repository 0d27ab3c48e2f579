"""Colours of images as their owners see them: profiles, sample ranges, and what is transparent."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageCms

from pipeline.media import colour
from pipeline.media.pixels import MediaError, decode
from tests.pipeline.media import made
from tests.pipeline.media.test_image_decoding import saved

LIMIT = 10_000
COLOURS = np.array([[(220, 30, 90), (30, 200, 60)], [(10, 40, 230), (128, 128, 128)]], np.uint8)
PICTURE = COLOURS.repeat(16, 0).repeat(16, 1)


def corners(data: bytes, **options) -> np.ndarray:
    """The four quarters of a picture of 32 x 32."""
    return decode(data, LIMIT, **options)[8::16, 8::16].astype(int)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("JPEG", "RGB"), ("PNG", "RGB"), ("WEBP", "RGB"), ("TIFF", "RGB"), ("AVIF", "RGB")),
        *(("PNG", "RGBA"), ("WEBP", "RGBA"), ("TIFF", "RGBA"), ("AVIF", "RGBA"), ("PNG", "P"), ("TIFF", "P")),
    ],
)
def test_an_embedded_profile_is_converted_to_srgb_unless_that_is_switched_off(kind: str, mode: str) -> None:
    picture = Image.fromarray(PICTURE).convert(mode) if mode != "P" else Image.fromarray(PICTURE).quantize(4)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 98, "subsampling": 0}, "AVIF": {"quality": 100}}
    data = saved(picture, kind, icc_profile=made.swapped_profile(), **options.get(kind, {}))
    tolerance = 6 if kind in ("JPEG", "AVIF") else 3
    assert np.abs(corners(data) - COLOURS[..., ::-1]).max() <= tolerance
    assert np.abs(corners(data, convert_to_srgb=False) - COLOURS).max() <= tolerance


@pytest.mark.parametrize("kind", ["BMP", "JPEG2000"])
def test_profiles_that_pillow_does_not_read_are_found(kind: str) -> None:
    profile = made.swapped_profile()
    plain = saved(Image.fromarray(PICTURE), "JPEG2000")
    data = made.bmp_v5(PICTURE, profile) if kind == "BMP" else made.jp2_with(plain, profile)
    assert np.abs(corners(data) - COLOURS[..., ::-1]).max() <= 2
    assert np.array_equal(corners(data, convert_to_srgb=False), COLOURS)


def test_profiles_apply_to_palettes_and_keep_alpha() -> None:
    picture = Image.fromarray(PICTURE).convert("RGBA")
    picture.putalpha(Image.fromarray(np.where(np.arange(32) < 16, 0, 255).astype(np.uint8)[None].repeat(32, 0)))
    found = corners(saved(picture, "PNG", icc_profile=made.swapped_profile()))
    assert found[:, 0].tolist() == [[255] * 3] * 2
    assert np.abs(found[:, 1] - COLOURS[:, 1, ::-1]).max() <= 2


def test_a_grey_profile_changes_grey_and_only_grey() -> None:
    grey = Image.new("L", (32, 32), 55)
    for mode in ("L", "LA"):
        assert np.abs(corners(saved(grey.convert(mode), "PNG", icc_profile=made.grey_profile())) - 128).max() <= 1
    data = saved(Image.fromarray(PICTURE), "PNG", icc_profile=made.grey_profile())
    assert np.array_equal(corners(data), COLOURS)
    assert np.array_equal(corners(saved(grey, "PNG", icc_profile=made.swapped_profile())), np.full((2, 2, 3), 55))


@pytest.mark.parametrize(
    "profile",
    [made.srgb_profile(), b"no profile", made.swapped_profile()[:200], b"\0" * (colour.MAX_PROFILE_BYTES + 1)],
)
def test_srgb_profiles_and_profiles_that_cannot_be_used_change_nothing(profile: bytes) -> None:
    assert np.array_equal(corners(saved(Image.fromarray(PICTURE), "TIFF", icc_profile=profile)), COLOURS)


def test_a_profile_beyond_the_limit_is_not_used() -> None:
    profile = made.swapped_profile()
    padded = profile + b"\0" * (colour.MAX_PROFILE_BYTES + 1 - len(profile))
    assert np.array_equal(corners(saved(Image.fromarray(PICTURE), "TIFF", icc_profile=padded)), COLOURS)
    assert not np.array_equal(corners(saved(Image.fromarray(PICTURE), "TIFF", icc_profile=padded[:-1])), COLOURS)


LEVELS = np.array([[0, 1], [2, 3]])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize(("bits", "stated"), [(8, None), (12, None), (16, None), (16, 4095), (16, 1023), (12, 1023)])
def test_grey_tiffs_have_their_range_and_polarity(bits: int, stated: int | None, photometric: int, order: str) -> None:
    top = stated or (1 << bits) - 1
    values = (LEVELS * top // 3).repeat(16, 0).repeat(16, 1)
    samples = values if photometric else top - values
    data = made.tiff(samples, bits, photometric, order, {} if stated is None else {281: [stated]})
    assert np.abs(corners(data)[..., 0] - LEVELS * 85).max() <= 1


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("stated", "separate"), [(None, False), (None, True), (4095, False)])
def test_colour_tiffs_of_16_bits_have_their_range(stated: int | None, separate: bool, order: str) -> None:
    samples = PICTURE.astype(int) * (stated or 65535) // 255
    data = made.tiff(samples, 16, 2, order, {} if stated is None else {281: [stated] * 3}, separate)
    assert np.abs(corners(data) - COLOURS).max() <= 1


def test_cielab_is_converted() -> None:
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    data = saved(ImageCms.applyTransform(Image.fromarray(PICTURE), to_lab), "TIFF")
    assert np.abs(corners(data) - COLOURS).mean() <= 3


@pytest.mark.parametrize(("extra", "is_alpha"), [(None, False), (0, False), (1, True), (2, True)])
def test_a_fourth_channel_of_a_tiff_is_alpha_only_if_it_is_declared(extra: int | None, is_alpha: bool) -> None:
    samples = np.concatenate([np.zeros((32, 32, 3), int), np.zeros((32, 32, 1), int)], axis=2)
    data = made.tiff(samples, 8, 2, tags={} if extra is None else {338: [extra]})
    assert corners(data).min() == corners(data).max() == (255 if is_alpha else 0)


@pytest.mark.parametrize("alpha", [0, 128, 255])
def test_alpha_of_a_bmp_counts_unless_it_is_zero_everywhere(alpha: int) -> None:
    samples = np.dstack([PICTURE, np.full((32, 32), alpha)])
    shown = COLOURS if alpha in (0, 255) else (COLOURS * 128.0 + 255 * 127) / 255
    assert np.abs(corners(made.bmp(samples)) - shown).max() <= 1


@pytest.mark.parametrize(
    ("bits", "masks", "header_bytes"),
    [
        (16, (0xF800, 0x07E0, 0x001F), 40),
        (16, (0x7C00, 0x03E0, 0x001F, 0x8000), 108),
        (16, (0x0F00, 0x00F0, 0x000F, 0xF000), 108),
        (16, (0x0F00, 0x00F0, 0x000F, 0), 124),
        (32, (0x3FF00000, 0x000FFC00, 0x000003FF, 0), 108),
        (32, (0x000003FF, 0x000FFC00, 0x3FF00000, 0xC0000000), 108),
        (32, (0x000000FF, 0x0000FF00, 0x00FF0000, 0), 108),
        (32, made.BGRA, 40),
    ],
)
@pytest.mark.parametrize("alpha", [0, 255])
def test_channels_of_a_bmp_are_where_its_masks_are(
    bits: int, masks: tuple[int, ...], header_bytes: int, alpha: int
) -> None:
    samples = np.dstack([PICTURE, np.full((32, 32), alpha)])
    data = made.bmp(samples, bits, masks, header_bytes)
    assert np.abs(corners(data) - COLOURS).max() <= (9 if bits == 16 else 1)
    with pytest.raises(MediaError, match="cannot"):
        decode(data[:-5], LIMIT)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("is_used", [False, True])
def test_the_transparent_value_of_a_grey_png_is_white(bits: int, is_used: bool) -> None:
    top = (1 << bits) - 1
    dark = 0 if bits < 4 else top // 3
    samples = np.full((32, 32), top)
    samples[:16] = dark
    transparent = dark if is_used else top - (bits > 1)
    found = corners(made.png(samples, bits, made.chunk(b"tRNS", transparent.to_bytes(2, "big"))))[..., 0]
    assert found.tolist() == [[255 if is_used else dark * 255 // top] * 2, [255] * 2]


@pytest.mark.parametrize("low_byte", [0, 1])
def test_the_transparent_colour_of_a_png_with_16_bits_is_compared_in_full(low_byte: int) -> None:
    samples = PICTURE.astype(int) * 256 + 7
    colour_16 = b"".join(int(value).to_bytes(2, "big") for value in samples[0, 0] + [0, 0, low_byte])
    found = corners(made.png(samples, 16, made.chunk(b"tRNS", colour_16)))
    shown = COLOURS.copy()
    if low_byte == 0:
        shown[0, 0] = 255
    assert np.abs(found - shown).max() <= 1
