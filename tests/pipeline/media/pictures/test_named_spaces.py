"""Colour spaces that PNG and AVIF name by numbers (CICP) or by gAMA and cHRM, without a profile."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.media.named_spaces import HLG, PQ, named_space
from pipeline.media.pixels import MediaError, decode
from tests.pipeline.media import made
from tests.pipeline.media.pictures.layouts import pil, samples_of, whole
from tests.pipeline.media.pictures.profiles import spaces
from tests.pipeline.media.test_image_decoding import saved
from tests.pipeline.media.video.test_colour import BT709_TO_BT2020, PATCHES, hdr

SAMPLES = samples_of("rgb")
PICTURE = whole(SAMPLES)
P3_XY = (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
SRGB_XY = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
SRGB_CHUNK = made.chunk(b"sRGB", b"\0")


def cicp(primaries: int, transfer: int) -> bytes:
    return made.chunk(b"cICP", bytes((primaries, transfer, 0, 1)))


def gamma(value: int) -> bytes:
    return made.chunk(b"gAMA", struct.pack(">I", value))


def primaries(*values: float) -> bytes:
    return made.chunk(b"cHRM", struct.pack(">8I", *(round(100_000 * value) for value in values)))


def avif(numbers: tuple[int, int], kind: str = "AVIF") -> bytes:
    """An AVIF or HEIF whose nclx box has these numbers."""
    options = {"quality": 100, "subsampling": "4:4:4"} if kind == "AVIF" else {"quality": -1, "chroma": 444}
    data = pil(kind, "RGB", **options)(SAMPLES, None, 1)
    at = data.index(b"nclx") + 4
    return data[:at] + struct.pack(">HH", *numbers) + data[at + 4 :]


def shown(data: bytes, **options) -> np.ndarray:
    return decode(data, 10_000, **options).astype(float)


def with_exponent(exponent: float, values: np.ndarray = SAMPLES) -> np.ndarray:
    light = values**exponent
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


P3, PLAIN = spaces()["p3"].to_srgb(SAMPLES), 255 * SAMPLES
PNGS: dict[str, tuple[tuple[bytes, ...], np.ndarray]] = {
    "numbers of P3": ((cicp(12, 13),), P3),
    "numbers of sRGB": ((cicp(1, 13),), PLAIN),
    "numbers of BT.709": ((cicp(1, 1),), PLAIN),
    "numbers of linear light": ((cicp(1, 8),), with_exponent(1.0)),
    "unknown numbers": ((cicp(2, 2),), PLAIN),
    "gamma": ((gamma(100_000),), with_exponent(1.0)),
    "gamma of old displays": ((gamma(55_555), primaries(*SRGB_XY)), with_exponent(1.8)),
    "gamma of sRGB": ((gamma(45_455), primaries(*SRGB_XY)), PLAIN),
    "gamma beside sRGB": ((SRGB_CHUNK, gamma(100_000)), PLAIN),
    "primaries of P3": ((gamma(45_455), primaries(*P3_XY)), P3),
    "primaries alone": ((primaries(*P3_XY),), PLAIN),
    "impossible gamma": ((gamma(0),), PLAIN),
    "impossible primaries": ((gamma(100_000), primaries(*[0.3] * 8)), PLAIN),
}


def png_of(name: str) -> bytes:
    return made.png(PICTURE, 8, *PNGS[name][0])


@pytest.mark.parametrize("name", PNGS)
def test_a_png_is_shown_in_its_named_colour_space(name: str) -> None:
    data, (_, wanted) = png_of(name), PNGS[name]
    assert np.abs(shown(data) - wanted).max() <= 2
    assert np.array_equal(shown(data, convert_to_srgb=False), PICTURE)


def test_numbers_take_precedence_over_a_profile_and_a_profile_over_gamma() -> None:
    data = saved(Image.fromarray(PICTURE), "PNG", icc_profile=spaces()["p3"].profile)
    at = 33  # after the header
    assert np.abs(shown(data[:at] + cicp(1, 13) + data[at:]) - PLAIN).max() <= 2
    assert np.abs(shown(data[:at] + gamma(100_000) + data[at:]) - P3).max() <= 2


def test_gamma_applies_to_grey_with_and_without_alpha_and_in_16_bits() -> None:
    grey = samples_of("grey")
    wanted = np.broadcast_to(with_exponent(1.0, grey), (*grey.shape[:2], 3))
    deep = made.png(whole(grey[..., 0], 65535), 16, gamma(100_000))
    assert np.abs(shown(deep) - wanted).max() <= 3
    for mode in ("L", "LA", "P"):
        data = saved(Image.fromarray(whole(grey[..., 0])).convert(mode), "PNG")
        assert np.abs(shown(data[:33] + gamma(100_000) + data[33:]) - wanted).max() <= 2, mode


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
@pytest.mark.parametrize(("numbers", "is_p3"), [((12, 13), True), ((1, 13), False), ((2, 2), False), ((1, 1), False)])
def test_an_avif_or_heif_is_shown_in_its_named_colour_space(numbers: tuple[int, int], is_p3: bool, kind: str) -> None:
    data = avif(numbers, kind)
    assert np.abs(shown(data) - (P3 if is_p3 else PLAIN)).max() <= 4
    assert np.abs(shown(data, convert_to_srgb=False) - PLAIN).max() <= 4


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_hdr_images_are_tone_mapped_and_keep_their_alpha(transfer: int) -> None:
    light = np.where(PATCHES <= 10.3, PATCHES / 255 / 12.92, ((PATCHES / 255 + 0.055) / 1.055) ** 2.4)
    coded = whole(hdr(203 * light @ BT709_TO_BT2020.T, transfer).clip(0, 1))[None].repeat(8, 0)
    assert np.abs(shown(made.png(coded, 8, cicp(9, transfer)))[4] - PATCHES).max() <= 12
    clear = saved(Image.fromarray(np.dstack([coded, np.zeros(coded.shape[:2], np.uint8)])), "PNG")
    assert (shown(clear[:33] + cicp(9, transfer) + clear[33:]) == 255).all()
    with pytest.raises(MediaError, match=r"HDR in another colour space than BT\.2020") as caught:
        shown(made.png(coded, 8, cicp(12, transfer)))
    assert caught.value.code == "unsupported_image"


@given(data=st.data())
def test_damaged_boxes_name_no_space_and_raise_nothing(data: st.DataObject) -> None:
    whole_file = avif((12, 13))
    head = whole_file.index(b"mdat")
    damaged = bytearray(whole_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, head))] = data.draw(st.integers(0, 255))
    image = Image.new("RGB", (1, 1))
    image.format = "AVIF"
    named_space(image, bytes(damaged[: data.draw(st.integers(head, len(damaged)))]))
