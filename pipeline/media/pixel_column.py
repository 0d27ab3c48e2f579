"""The column of decoded images, built in place: decoders write pixels into the memory that Arrow then reads."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.rows import schemas


class PixelColumn:
    """Rows of RGB images as `list<rows.PIXELS>`, in chunks of up to `chunk_bytes` of pixels.

    Memory is reserved for a whole chunk and taken from the system only as far as pixels are written.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[pa.Array] = []
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sizes: list[tuple[int, int]] = []
        self._num_images: list[int] = []
        self._used = self._row_start = self._row_images = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of pixels in the row that is being written."""
        return self._used - self._row_start

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory for the next image's pixels."""
        if self._used + num_bytes > len(self._memory):
            self._next_chunk(num_bytes)
        start, self._used = self._used, self._used + num_bytes
        return self._memory[start : self._used].data

    def _next_chunk(self, num_bytes: int) -> None:
        """Close the chunk before the row that is being written, which moves into the next one."""
        begun, sizes = self._memory[self._row_start : self._used], self._sizes[len(self._sizes) - self._row_images :]
        del self._sizes[len(self._sizes) - self._row_images :]
        memory = np.empty(max(self._chunk_bytes, len(begun) + num_bytes), np.uint8)
        memory[: len(begun)] = begun
        self._close()
        self._memory, self._sizes = memory, sizes
        self._row_start, self._used = 0, len(begun)

    def add_image(self, height: int, width: int) -> None:
        """The memory taken last holds an image of this size, the next of its row."""
        self._sizes.append((height, width))
        self._row_images += 1

    def end_row(self) -> None:
        """The images added since the last row are one row."""
        self._num_images.append(self._row_images)
        self._row_start, self._row_images = self._used, 0

    def forget_row(self) -> None:
        """Forget the images added since the last row."""
        del self._sizes[len(self._sizes) - self._row_images :]
        self._used, self._row_images = self._row_start, 0

    def add_copy(self, image: NDArray[np.uint8]) -> None:
        """One more image of the row: a copy of these pixels (height, width, 3)."""
        self.take(image.nbytes)[:] = np.ascontiguousarray(image).data.cast("B")
        self.add_image(*image.shape[:2])

    def last_row(self) -> list[NDArray[np.uint8]]:
        """The images of the row that was ended last."""
        images: list[NDArray[np.uint8]] = []
        end = self._row_start
        for height, width in reversed(self._sizes[len(self._sizes) - self._num_images[-1] :]):
            start = end - 3 * height * width
            images.insert(0, self._memory[start:end].reshape(height, width, 3))
            end = start
        return images

    def finish(self) -> pa.ChunkedArray:
        """The column."""
        self._close()
        return pa.chunked_array(self._chunks, pa.list_(schemas.PIXELS))

    def _close(self) -> None:
        if self._num_images:
            self._chunks.append(_lists(self._sizes, self._num_images, pa.py_buffer(self._memory[: self._row_start])))
        self._sizes, self._num_images = [], []


def _lists(sizes: list[tuple[int, int]], num_images: list[int], memory: pa.Buffer) -> pa.Array:
    num_bytes = [3 * height * width for height, width in sizes]
    ends = pa.py_buffer(np.concatenate([[0], np.cumsum(num_bytes)]).astype(np.int64))
    parts = [
        pa.array([height for height, _ in sizes], pa.int32()),
        pa.array([width for _, width in sizes], pa.int32()),
        pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), [None, ends, memory]),
    ]
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_images)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(schemas.PIXELS)))
