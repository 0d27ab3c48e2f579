"""Builds the Arrow column of decoded images in place: pixels are written directly into the memory of the arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.rows import schemas


class PixelColumn:
    """Builds rows of RGB images as `list<schemas.PIXELS>`, in chunks of up to `chunk_bytes` bytes of pixels."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[pa.Array] = []
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sizes: list[tuple[int, int]] = []
        """(height, width) of all images in the chunk's finished rows."""
        self._row_sizes: list[tuple[int, int]] = []
        self._num_images: list[int] = []
        self._used = self._row_start = 0

    @property
    def row_bytes(self) -> int:
        return self._used - self._row_start

    def take(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of writable memory for the next image's pixels."""
        if self._used + num_bytes > len(self._memory):
            # The unfinished row moves into the next chunk.
            unfinished = self._memory[self._row_start : self._used]
            memory = np.empty(max(self._chunk_bytes, len(unfinished) + num_bytes), np.uint8)
            memory[: len(unfinished)] = unfinished
            self._close()
            self._memory, self._row_start, self._used = memory, 0, len(unfinished)
        start, self._used = self._used, self._used + num_bytes
        return self._memory[start : self._used].data

    def add_image(self, height: int, width: int) -> None:
        """Add an image of this size, whose pixels are in the memory taken last, to the unfinished row."""
        self._row_sizes.append((height, width))

    def row_images(self) -> list[NDArray[np.uint8]]:
        """Return the unfinished row's images (height, width, 3) as views, which are valid until the next `take`."""
        ends = self._row_start + np.cumsum([0, *(3 * height * width for height, width in self._row_sizes)])
        spans = zip(ends[:-1], ends[1:], self._row_sizes, strict=True)
        return [self._memory[start:stop].reshape(*size, 3) for start, stop, size in spans]

    def end_row(self) -> None:
        self._num_images.append(len(self._row_sizes))
        self._sizes += self._row_sizes
        self._row_start, self._row_sizes = self._used, []

    def forget_row(self) -> None:
        self._used, self._row_sizes = self._row_start, []

    def copy_last_row(self) -> None:
        """Add copies of the last finished row's images to the unfinished row."""
        sizes = self._sizes[len(self._sizes) - self._num_images[-1] :]
        num_bytes = [3 * height * width for height, width in sizes]
        pixels = self._memory[self._row_start - sum(num_bytes) : self._row_start]
        for size, part in zip(sizes, np.split(pixels, np.cumsum(num_bytes)[:-1]), strict=False):
            self.take(len(part))[:] = part.data
            self.add_image(*size)

    def finish(self) -> pa.ChunkedArray:
        self._close()
        return pa.chunked_array(self._chunks, pa.list_(schemas.PIXELS))

    def _close(self) -> None:
        if self._num_images:
            num_bytes = [3 * height * width for height, width in self._sizes]
            ends = pa.py_buffer(np.cumsum([0, *num_bytes], dtype=np.int64))
            memory = pa.py_buffer(self._memory[: self._row_start])
            sides = np.array(self._sizes, np.int32).reshape(-1, 2)
            rgb = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sides), [None, ends, memory])
            images = pa.StructArray.from_arrays(
                [pa.array(sides[:, 0]), pa.array(sides[:, 1]), rgb], fields=list(schemas.PIXELS)
            )
            offsets = pa.array(np.cumsum([0, *self._num_images], dtype=np.int32))
            self._chunks.append(pa.ListArray.from_arrays(offsets, images))
        self._sizes, self._num_images = [], []
