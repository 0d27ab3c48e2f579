"""Estimate the bytes of a processor's outputs from the bytes of decoded images and clips, by measuring a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from models.inputs.clip import Clip
from models.inputs.packing import TEXT_INPUTS, PackedInputs
from models.inputs.processing import FrontEnd, PromptError

SIDES_PX = ((32, 32), (336, 336), (336, 1344), (1344, 336), (672, 672), (1344, 1344))
"""Heights and widths of the measured pictures: below, at and above the sizes to which processors resize."""
CLIP_FRAMES = (2, 8)
CLIP_SIDES_PX = ((32, 32), (336, 336))
MARGIN = 1.25
"""Factor of all estimates: processors round sides up to whole patches, by other shares than those of the measured
sizes."""
QUESTION = {"type": "text", "text": "What is this?"}


@dataclass(frozen=True)
class Growth:
    """Estimate of bytes after processing: `base` + `slope` · decoded bytes."""

    base: int = 0
    slope: float = 0.0

    @classmethod
    def over(cls, points: Sequence[tuple[int, int]]) -> Self:
        """Return a line from the first point (decoded bytes, output bytes) that no other point exceeds."""
        base = points[0][1]
        return cls(base, max(max((output - base) / decoded, 0.0) for decoded, output in points))

    def of(self, decoded_bytes: Iterable[int]) -> int:
        """Return the sum over media of these decoded bytes."""
        return sum(self.base + int(self.slope * num_bytes) for num_bytes in decoded_bytes)


@dataclass(frozen=True)
class MediaSizes:
    """Estimates for one kind of media: all packed outputs, those of the text alone, and all outputs unpacked."""

    packed: Growth = Growth()
    text: Growth = Growth()
    unpacked: Growth = Growth()


@dataclass(frozen=True)
class OutputSizes:
    """Estimates of the outputs of one processor; zero for media that it does not take."""

    images: MediaSizes = MediaSizes()
    clips: MediaSizes = MediaSizes()

    @classmethod
    def measure(cls, front_end: FrontEnd, max_side_px: int | None) -> Self:
        """Measure a processor with noise; pictures are at most `max_side_px` long. Takes less than a second."""
        if not front_end.takes_images:
            return cls()
        limit = max_side_px or max(SIDES_PX[-1])
        generator = np.random.default_rng(0)
        samples = [
            generator.integers(0, 256, (min(height, limit), min(width, limit), 3), dtype=np.uint8)
            for height, width in SIDES_PX
        ]
        images = _sizes(front_end, "image", [(image.nbytes, ([image], [])) for image in samples])
        if not front_end.takes_videos:
            return cls(images)
        clips = [
            Clip(generator.integers(0, 256, (count, *side, 3), dtype=np.uint8), tuple(map(float, range(count))), 1.0)
            for side in CLIP_SIDES_PX
            for count in CLIP_FRAMES
        ]
        return cls(images, _sizes(front_end, "video", [(clip.frames.nbytes, ([], [clip])) for clip in clips]))

    def packed_bytes(self, images: Sequence[int], clips: Sequence[int], num_prompts: int = 1) -> int:
        """Estimate packed outputs of `num_prompts` prompts about the same media of these decoded bytes."""
        once = self.images.packed.of(images) + self.clips.packed.of(clips)
        return once + (num_prompts - 1) * (self.images.text.of(images) + self.clips.text.of(clips))

    def unpacked_bytes(self, images: Sequence[int], clips: Sequence[int]) -> int:
        """Estimate the outputs of one prompt before they are packed."""
        return self.images.unpacked.of(images) + self.clips.unpacked.of(clips)


Media = tuple[list[Any], list[Clip]]


def _sizes(front_end: FrontEnd, kind: str, cases: Sequence[tuple[int, Media]]) -> MediaSizes:
    """Measure the cases (decoded bytes, media) that the processor takes; zero if it refuses all of them."""
    points = []
    for decoded, media in cases:
        if (packed := _packed(front_end, kind, *media)) is not None:
            points.append((decoded, packed))
    if not points:
        return MediaSizes()

    def growth(count: Callable[[PackedInputs], int]) -> Growth:
        line = Growth.over([(decoded, count(packed)) for decoded, packed in points])
        return Growth(int(MARGIN * line.base), MARGIN * line.slope)

    return MediaSizes(
        growth(lambda inputs: inputs.num_bytes),
        growth(lambda inputs: sum(each.num_bytes for name, each in inputs.tensors.items() if name in TEXT_INPUTS)),
        growth(lambda inputs: inputs.num_unpacked_bytes),
    )


def _packed(front_end: FrontEnd, kind: str, images: list[Any], clips: list[Clip]) -> PackedInputs | None:
    token = getattr(front_end.processor, f"{kind}_token", "")
    prompts: tuple[Callable[[], str], ...] = (
        lambda: front_end.render([{"role": "user", "content": [{"type": kind}, QUESTION]}]),
        lambda: f"{token}{QUESTION['text']}",
    )
    for prompt in prompts:
        try:
            return front_end.pack(prompt(), images, clips)
        except PromptError:
            continue
    return None
