"""A contact sheet shows every image once, whole, in order, with its words under it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.sheets.contact_sheet import MARGIN_PX, contact_sheet, fit

SIDE_PX = 64


def plain(grey: int, height: int = 16, width: int = 16) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((height, width, 3), grey, np.uint8)


def opened(data: bytes) -> np.ndarray[Any, Any]:
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB")).astype(int)


def test_images_are_in_reading_order_in_about_a_square() -> None:
    sheet = opened(contact_sheet([plain(10 * number) for number in range(16)], side_px=SIDE_PX))
    assert sheet.shape == (4 * (SIDE_PX + MARGIN_PX) + MARGIN_PX, 4 * (SIDE_PX + MARGIN_PX) + MARGIN_PX, 3)
    centres = [MARGIN_PX + SIDE_PX // 2 + index * (SIDE_PX + MARGIN_PX) for index in range(4)]
    assert [int(sheet[y, x, 0]) for y in centres for x in centres] == [10 * number for number in range(16)]


def test_an_image_keeps_its_shape() -> None:
    assert fit(plain(1, 32, 64), SIDE_PX).size == (SIDE_PX, SIDE_PX // 2)
    assert fit(plain(1, 300, 100), SIDE_PX).size == (21, SIDE_PX)
    assert fit(plain(1, 1, 4000), SIDE_PX).size == (SIDE_PX, 1)


def test_small_images_grow_by_whole_pixels() -> None:
    checks = (np.indices((4, 4)).sum(axis=0) % 2 * 255).astype(np.uint8)
    grown = np.asarray(fit(np.repeat(checks[..., None], 3, axis=-1), SIDE_PX))
    assert set(np.unique(grown)) == {0, 255}


def test_captions_and_a_title_have_space_of_their_own() -> None:
    images = [plain(0)] * 3
    bare = opened(contact_sheet(images, columns=3, side_px=SIDE_PX))
    result = opened(contact_sheet(images, ["one", "two words here", ""], columns=3, side_px=SIDE_PX))
    titled = opened(contact_sheet(images, columns=3, side_px=SIDE_PX, title="sixteen images"))
    assert result.shape[0] > bare.shape[0] < titled.shape[0]
    below = result[MARGIN_PX + SIDE_PX + 2 :, : SIDE_PX + MARGIN_PX]
    assert below.min() < 100, "no ink under the first image"
    assert result[MARGIN_PX + SIDE_PX + 2 :, -SIDE_PX - MARGIN_PX :].min() == 255, "ink under the image without words"


def test_no_image_or_words_for_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        contact_sheet([])
    with pytest.raises(ValueError, match="2 captions for 1 images"):
        contact_sheet([plain(0)], ["a", "b"])
