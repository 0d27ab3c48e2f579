"""Pictures as in the training of the VQ model: shrunk, cropped to a square around the middle, in [-1, 1].

The crop is that of ADM, which made the data of LlamaGen and LANTERN.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


def square_pixels(image: NDArray[np.uint8], side_px: int) -> Tensor:
    """uint8 RGB (height, width, 3) of any size → pixels (3, side_px, side_px) in [-1, 1], fp32."""
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * side_px:
        # Halving by mean first keeps fine patterns from turning into others.
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = side_px / min(picture.size)
    size = (max(side_px, round(picture.width * scale)), max(side_px, round(picture.height * scale)))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - side_px) // 2, (size[0] - side_px) // 2
    cut = pixels[top : top + side_px, left : left + side_px].copy()
    return torch.from_numpy(cut).permute(2, 0, 1).float() / 127.5 - 1.0
