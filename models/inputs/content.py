"""Content keys: pixels, frames and features as keys of a dictionary.

A key is hashed by a few values and compared completely, so unique contents cost next to nothing and equal keys have
equal contents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from models.inputs.clip import Clip

NUM_GLANCES = 64
"""Values of an array that its hash is made of."""


class Content:
    """Arrays and other values that must be equal, as one key."""

    def __init__(self, arrays: Sequence[NDArray[np.generic]], label: Hashable = None) -> None:
        self._arrays = tuple(arrays)
        self._label = (label, tuple((array.shape, array.dtype.str) for array in arrays))
        self._hash = hash((self._label, *map(_glance, arrays)))

    @classmethod
    def shown(cls, images: Sequence[NDArray[np.uint8]], videos: Sequence[Clip], label: Hashable = None) -> Content:
        """What a prompt shows: images, and clips with the times of their frames."""
        times = tuple((clip.timestamps_s, clip.fps) for clip in videos)
        return cls([*images, *(clip.frames for clip in videos)], (label, len(images), times))

    @property
    def num_bytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self._arrays)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or self._hash != other._hash or self._label != other._label:
            return False
        return all(
            one is another or np.array_equal(one, another)
            for one, another in zip(self._arrays, other._arrays, strict=True)
        )

    def copy(self) -> Content:
        """The same over copies of the arrays, which no other code changes and which hold no other memory."""
        return Content([array.copy() for array in self._arrays], self._label[0])


def _glance(array: NDArray[np.generic]) -> bytes:
    """A few values, evenly spaced."""
    if array.size == 0:
        return b""
    places = np.linspace(0, array.size - 1, min(array.size, NUM_GLANCES), dtype=np.int64)
    return np.asarray(array.flat[places]).tobytes()
