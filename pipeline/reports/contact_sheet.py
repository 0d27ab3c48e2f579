"""Draws a contact sheet: a grid of images of one size with a caption under each."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MARGIN_PX = 8
CAPTION_LINES = 2
PAPER, INK = (255, 255, 255), (40, 40, 40)
ELLIPSIS = "…"


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
    num_rows = math.ceil(len(images) / columns)
    font = ImageFont.load_default(size=max(10, side_px // 14))
    line_px = math.ceil(font.getbbox("Ågjpqy")[3] * 1.15)
    caption_px = line_px * CAPTION_LINES + MARGIN_PX // 2 if captions else 0
    title_px = line_px + MARGIN_PX if title else 0
    cell_px = (side_px + MARGIN_PX, side_px + caption_px + MARGIN_PX)
    sheet = Image.new("RGB", (columns * cell_px[0] + MARGIN_PX, title_px + num_rows * cell_px[1] + MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        [line] = wrap(title, font, sheet.width - 2 * MARGIN_PX, 1)
        draw.text((MARGIN_PX, MARGIN_PX), line, INK, font)
    for number, image in enumerate(images):
        left = MARGIN_PX + (number % columns) * cell_px[0]
        top = title_px + MARGIN_PX + (number // columns) * cell_px[1]
        picture = fit(image, side_px)
        sheet.paste(picture, (left + (side_px - picture.width) // 2, top + (side_px - picture.height) // 2))
        lines = wrap(captions[number], font, side_px, CAPTION_LINES) if captions else []
        for place, line in enumerate(lines):
            draw.text((left, top + side_px + MARGIN_PX // 2 + place * line_px), line, INK, font)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def fit(image: NDArray[np.uint8], side_px: int) -> Image.Image:
    """Scale an image to a longer side of `side_px`; integer scales repeat pixels, others use Lanczos resampling."""
    picture = Image.fromarray(image)
    scale = side_px / max(picture.size)
    kind = Image.Resampling.NEAREST if scale == int(scale) else Image.Resampling.LANCZOS
    return picture.resize([max(1, round(side * scale)) for side in picture.size], kind)


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width_px: int, max_lines: int) -> list[str]:
    """Wrap text at spaces into at most `max_lines` lines of `width_px`; longer text ends in an ellipsis."""
    words = "".join(letter if letter.isprintable() else " " for letter in text[:1000]).split()
    lines: list[str] = []
    while words and len(lines) < max_lines:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width_px:
            line = f"{line} {words.pop(0)}"
        is_cut = font.getlength(line) > width_px or (bool(words) and len(lines) == max_lines - 1)
        while is_cut and line and font.getlength(line + ELLIPSIS) > width_px:
            line = line[:-1]
        lines.append(line.rstrip() + ELLIPSIS if is_cut else line)
    return lines or [""]
