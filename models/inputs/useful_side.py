"""The longer side beyond which a model's processor gains nothing from an image: the default of `source.max_side_px`.

The bound is well beyond the size to which the processor itself shrinks images, so that shrinking first changes only the
last digits of the filter:

- a fixed size, a shortest edge or a crop of s pixels: 4 s, so that the shorter side keeps s up to an aspect of 4 to 1
- a grid of tiles whose largest side is s pixels, or a longest edge of s pixels: 2 s
- an area of at most n pixels: the side of n pixels at 4 to 1

Other processors have no known bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from models.inputs.video import VideoProcessor

SIZE_FACTOR = 4
TILES_FACTOR = 2
EDGE_FACTOR = 2
ASPECT = 4
LEAST_PX = 1024
"""No image is shrunk below this, however little the processor uses: such images cost little."""

SIZED = ("CLIP", "Siglip", "Llava", "Blip")
TILED = ("LlavaNext", "LlavaOnevision")
EDGED = ("Idefics3", "SmolVLM", "Pixtral")
COUNTED = ("Qwen2VL", "Glm4v")


def useful_side_px(parts: Iterable[Any]) -> int | None:
    """The largest bound of a processor's image and video parts; None where one of them has no known bound."""
    bounds = [_bound(part) for part in parts]
    known = [bound for bound in bounds if bound is not None]
    return max(LEAST_PX, *known) if known and len(known) == len(bounds) else None


def _bound(part: Any) -> int | None:
    size = _numbers(getattr(part, "size", None))
    if not size or not getattr(part, "do_resize", True):
        return None
    if isinstance(part, VideoProcessor):
        return _side_of_area(size) if part.is_patched else SIZE_FACTOR * max(size.values())
    family = type(part).__name__.partition("ImageProcessor")[0]
    if family in SIZED:
        crop = _numbers(getattr(part, "crop_size", None)) if getattr(part, "do_center_crop", False) else {}
        return SIZE_FACTOR * max(*size.values(), *crop.values(), 0)
    if family in TILED:
        pinpoints = getattr(part, "image_grid_pinpoints", None) or []
        sides = [int(side) for point in pinpoints for side in point]
        return TILES_FACTOR * max(sides) if sides else None
    if family in EDGED:
        return EDGE_FACTOR * size["longest_edge"] if "longest_edge" in size else None
    if family in COUNTED:
        return _side_of_area(size)
    return None


def _side_of_area(size: Mapping[str, int]) -> int | None:
    """For sizes that count pixels under the names of edges, as the Qwen family's do."""
    return math.ceil(math.sqrt(ASPECT * size["longest_edge"])) if "longest_edge" in size else None


def _numbers(size: Any) -> dict[str, int]:
    """The entries of a size in any of the forms that processors use."""
    if size is None or isinstance(size, (int, float)):
        return {} if size is None else {"shortest_edge": int(size)}
    return {name: int(value) for name, value in dict(size).items() if isinstance(value, (int, float))}
