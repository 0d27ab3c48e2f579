"""The default bound of images' longer side, from what processors make of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from models.inputs.useful_side import MIN_PX, useful_side_px


def part(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (("CLIPImageProcessorPil", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}), 1344),
        (("SiglipImageProcessorPil", {"size": {"height": 384, "width": 384}}), 1536),
        (("CLIPImageProcessorPil", {}), MIN_PX),
        (("LlavaNextImageProcessorPil", {}), 2016),
        (("LlavaOnevisionImageProcessorPil", {}), 4608),
        (("Idefics3ImageProcessorPil", {}), 2912),
        (("PixtralImageProcessorPil", {}), 2048),
        (("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}), 7168),
        (("SiglipImageProcessorPil", {"do_resize": False}), None),
        (("Gemma3ImageProcessorPil", {}), None),
    ],
)
def test_the_bound_follows_the_processors_settings(made: tuple[str, dict[str, Any]], expected: int | None) -> None:
    name, settings = made
    assert useful_side_px([part(name, **settings)]) == expected


def test_a_processor_without_a_known_bound_disables_shrinking() -> None:
    known = part("LlavaNextImageProcessorPil")
    assert useful_side_px([known, object()]) is None
    assert useful_side_px([]) is None
    assert useful_side_px([known, part("LlavaOnevisionImageProcessorPil")]) == 4608


@pytest.mark.parametrize("aspect", [1, 1.5, 4])
def test_an_image_of_the_bound_is_still_shrunk_by_a_processor_that_counts_pixels(aspect: float) -> None:
    most = 12845056
    side = useful_side_px([part("Qwen2VLImageProcessorPil", size={"shortest_edge": 3136, "longest_edge": most})])
    assert side is not None
    assert side * (side / aspect) >= most
