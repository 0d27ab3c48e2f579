"""A clip: some frames of one video and when they were seen. Knows neither files nor models, and needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames uint8 RGB (T, height, width, 3) in the order of their times.

    `timestamps_s` (T) count from the clip's own beginning. `fps` is how many of these frames stand for one second: T
    divided by the time that they were drawn from, which is what video models call the sampled rate.

    Raises:
        ValueError: no frames, wrong types or shapes, a timestamp for every frame is missing, or no positive rate.
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
