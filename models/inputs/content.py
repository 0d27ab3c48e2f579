"""Make arrays of pixels, frames and features hashable by content, and cache values by such keys.

The hash of a key samples a few values; equality compares all values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.inputs.clip import Clip


@dataclass(frozen=True, eq=False)
class ConditionPair:
    """Text features (L, D) of a prompt, and those of the negative prompt that replace the null embedding of a guided
    model's unconditional lane."""

    positive: NDArray[np.float32]
    negative: NDArray[np.float32]


NUM_GLANCES = 64
"""Values of an array that enter the hash."""
Value = TypeVar("Value")


class Content:
    """Hashable key over arrays and a label; keys are equal if labels and all array values are equal."""

    def __init__(self, arrays: Sequence[NDArray[np.generic]], label: Hashable = None) -> None:
        self._arrays = tuple(arrays)
        self._label = (label, tuple((array.shape, array.dtype.str) for array in arrays))
        self._hash = hash((self._label, *map(_glance, arrays)))

    @classmethod
    def shown(cls, images: Sequence[NDArray[np.uint8]], videos: Sequence[Clip], label: Hashable = None) -> Content:
        """Create the key of a prompt's media: images, and clips with the times of their frames."""
        times = tuple((clip.timestamps_s, clip.fps) for clip in videos)
        return cls([*images, *(clip.frames for clip in videos)], (label, len(images), times))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or self._hash != other._hash or self._label != other._label:
            return False
        return all(
            array is another or np.array_equal(array, another)
            for array, another in zip(self._arrays, other._arrays, strict=True)
        )

    def copy(self) -> Content:
        """Return an equal key over copies of the arrays."""
        return Content([array.copy() for array in self._arrays], self._label[0])


def _glance(array: NDArray[np.generic]) -> bytes:
    """Return the bytes of up to `NUM_GLANCES` evenly spaced values."""
    indices = np.linspace(0, max(0, array.size - 1), min(array.size, NUM_GLANCES), dtype=np.int64)
    return np.asarray(array.flat[indices]).tobytes()


class Recent(Generic[Value]):
    """Least-recently-used cache of at most `max_bytes`, keys included. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0, max_bytes
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Content, tuple[Value, int]] = OrderedDict()

    def get(self, key: Content) -> Value | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def keep(self, key: Content, value: Value, num_bytes: int) -> None:
        """Store a new key's value of `num_bytes` if it fits; the key's arrays are copied."""
        assert key not in self._entries
        total = key.num_bytes + num_bytes
        if total > self.max_bytes:
            return
        self._entries[key.copy()] = value, total
        self.num_bytes += total
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
