"""Represent a video clip as sampled frames and their times. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of one video, uint8 RGB (T, height, width, 3), in the order of their times.

    `timestamps_s` (T) are seconds from the beginning of the clip. `fps` is T divided by the sampled duration in
    seconds, which video models call the sampled rate. Raises ValueError for wrong types, shapes or numbers.
    """

    frames: NDArray[np.uint8]
    timestamps_s: tuple[float, ...]
    fps: float

    def __post_init__(self) -> None:
        shape = self.frames.shape
        if self.frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise ValueError(f"a clip is uint8 (frames, height, width, 3), not {self.frames.dtype} {shape}")
        if len(self.timestamps_s) != shape[0] or not all(math.isfinite(time) for time in self.timestamps_s):
            raise ValueError(f"a clip of {shape[0]} frames needs as many timestamps, all of them finite")
        if not (self.fps > 0.0 and math.isfinite(self.fps)):
            raise ValueError(f"a clip's fps must be positive, not {self.fps}")
