"""Draws a contact sheet: a grid of images of one size with a caption under each."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MARGIN_PX = 8
CAPTION_LINES = 2
PAPER, INK = (255, 255, 255), (40, 40, 40)


def contact_sheet(
    images: Sequence[NDArray[np.uint8]],
    captions: Sequence[str] = (),
    columns: int | None = None,
    side_px: int = 192,
    title: str = "",
) -> bytes:
    """Draw RGB images (height, width, 3) as one PNG of about a square, each scaled to fit a square of `side_px`."""
    if not len(images):
        raise ValueError("a contact sheet needs at least one image")
    if captions and len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} images")
    columns = min(len(images), columns or math.ceil(math.sqrt(len(images))))
    font = ImageFont.load_default(size=max(10, side_px // 14))
    line_px = math.ceil(font.getbbox("Ågjpqy")[3] * 1.15)
    title_px = line_px + MARGIN_PX if title else 0
    width_px = side_px + MARGIN_PX
    height_px = width_px + (line_px * CAPTION_LINES + MARGIN_PX // 2 if captions else 0)
    num_rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * width_px + MARGIN_PX, title_px + num_rows * height_px + MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(sheet)

    def write(text: str, left: int, top: int, space_px: int, max_lines: int) -> None:
        """Write text in lines of about `space_px`; longer text ends in an ellipsis."""
        num_letters = max(1, int(space_px / font.getlength("n")))
        lines = textwrap.wrap(text, num_letters, max_lines=max_lines, placeholder="…")
        draw.multiline_text((left, top), "\n".join(lines), INK, font)

    write(title, MARGIN_PX, MARGIN_PX, sheet.width - 2 * MARGIN_PX, 1)
    for number, image in enumerate(images):
        left = MARGIN_PX + number % columns * width_px
        top = title_px + MARGIN_PX + number // columns * height_px
        picture = fit(image, side_px)
        sheet.paste(picture, (left + (side_px - picture.width) // 2, top + (side_px - picture.height) // 2))
        if captions:
            write(captions[number], left, top + side_px + MARGIN_PX // 2, side_px, CAPTION_LINES)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def fit(image: NDArray[np.uint8], side_px: int) -> Image.Image:
    """Scale an image to a longer side of `side_px`; integer scales repeat pixels, others use Lanczos resampling."""
    picture = Image.fromarray(image)
    scale = side_px / max(picture.size)
    kind = Image.Resampling.NEAREST if scale == int(scale) else Image.Resampling.LANCZOS
    return picture.resize([max(1, round(side * scale)) for side in picture.size], kind)
