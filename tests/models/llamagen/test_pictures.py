"""Pictures are cut as the data of LlamaGen and LANTERN were: halved by mean, scaled, cut around the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from models.llamagen.vq import square_pixels


def adm_cut(image: Image.Image, side_px: int) -> np.ndarray:
    """The public `center_crop_arr`, step by step."""
    while min(*image.size) >= 2 * side_px:
        image = image.resize(tuple(size // 2 for size in image.size), resample=Image.Resampling.BOX)
    scale = side_px / min(*image.size)
    image = image.resize(tuple(round(size * scale) for size in image.size), resample=Image.Resampling.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - side_px) // 2, (pixels.shape[1] - side_px) // 2
    return pixels[top : top + side_px, left : left + side_px]


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (17, 90), (31, 33), (200, 131), (7, 300), (5, 5)])
def test_a_picture_of_any_size_is_cut_as_the_public_code_cuts_it(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels.setflags(write=False)
    cropped = square_pixels(pixels, 16)
    assert cropped.shape == (3, 16, 16)
    expected = torch.from_numpy(adm_cut(Image.fromarray(pixels), 16).copy()).permute(2, 0, 1)
    assert torch.equal(((cropped + 1.0) * 127.5).round().to(torch.uint8), expected)
    assert -1.0 <= float(cropped.min()) <= float(cropped.max()) <= 1.0
