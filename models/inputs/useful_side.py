"""Compute the longest image side that a model's processor can use, in pixels: the default of `source.max_side_px`.

The bound is well above the size to which the processor itself resizes images, so that a resize before it changes pixel
values only by rounding:

- a fixed size, a shortest edge or a crop of s pixels: 4 s, so that the shorter side keeps s up to an aspect of 4 to 1
- a grid of tiles whose largest side is s pixels, or a longest edge of s pixels: 2 s
- an area of at most n pixels: the side of n pixels at 4 to 1

Other processors have no known bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from models.inputs.video import VideoProcessor

# Bound per side in pixels of families with sizes, tiles or a longest edge; longest aspect ratio at which it holds.
SIZE_FACTOR, TILES_FACTOR, EDGE_FACTOR, ASPECT = 4, 2, 2, 4
MIN_PX = 1024
"""Lowest bound in pixels; smaller images are cheap to process."""

SIZED = ("CLIP", "Siglip", "Llava", "Blip")
TILED = ("LlavaNext", "LlavaOnevision")
EDGED = ("Idefics3", "SmolVLM", "Pixtral")
COUNTED = ("Qwen2VL", "Glm4v")


def useful_side_px(parts: Iterable[Any]) -> int | None:
    """Return the largest bound over image and video processors `parts`; None if any of them has no known bound."""
    bounds = [_bound(part) for part in parts]
    known = [bound for bound in bounds if bound is not None]
    return max(MIN_PX, *known) if known and len(known) == len(bounds) else None


def _bound(part: Any) -> int | None:
    size = _numbers(getattr(part, "size", None))
    if not size or not getattr(part, "do_resize", True):
        return None
    longest = size.get("longest_edge")
    # The longest edge of the Qwen family is an area in pixels.
    side_of_area = None if longest is None else math.ceil(math.sqrt(ASPECT * longest))
    if isinstance(part, VideoProcessor):
        return side_of_area if part.is_patched else SIZE_FACTOR * max(size.values())
    family = type(part).__name__.partition("ImageProcessor")[0]
    if family in SIZED:
        crop = _numbers(getattr(part, "crop_size", None)) if getattr(part, "do_center_crop", False) else {}
        return SIZE_FACTOR * max(*size.values(), *crop.values(), 0)
    if family in TILED:
        sides = [int(side) for point in getattr(part, "image_grid_pinpoints", None) or [] for side in point]
        return TILES_FACTOR * max(sides) if sides else None
    if family in EDGED:
        return None if longest is None else EDGE_FACTOR * longest
    return side_of_area if family in COUNTED else None


def _numbers(size: Any) -> dict[str, int]:
    """Convert a size to a dict of integers; a single number is the shortest edge."""
    if size is None or isinstance(size, (int, float)):
        return {} if size is None else {"shortest_edge": int(size)}
    return {name: int(value) for name, value in dict(size).items() if isinstance(value, (int, float))}
