"""Media of the stage `decoded` as arrays; the prompts of a sample share one copy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.inputs.clip import Clip

FILLER_INDEX = -1
"""`row_index` of a filler row (`pipeline.media.row_weights`); samples count from 0."""
_SAMPLE = ("source", "row_index", "clip_index")


def without_fillers(table: pa.Table) -> pa.Table:
    """A table's rows that are samples."""
    indices = table["row_index"]
    if not pc.any(pc.equal(indices, FILLER_INDEX)).as_py():
        return table
    # Slices instead of `filter`, which would copy the media.
    places = [place for place, index in enumerate(indices.to_pylist()) if index != FILLER_INDEX]
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])
    return pa.concat_tables([table.slice(0, 0), *(table.slice(start, stop - start) for start, stop in runs)])


def media_rows(table: pa.Table) -> list[int]:
    """For each row, the index of the row with its images and clips: itself, or the first row of the same sample if the
    sample has several prompts."""
    if table.column("prompt_index").null_count == table.num_rows:
        return list(range(table.num_rows))
    prompts = table.column("prompt_index").to_pylist()
    names = zip(*(table.column(name).to_pylist() for name in _SAMPLE), strict=True)
    images, videos = (_lengths(table.column(name)) for name in ("images", "videos"))
    holder: dict[tuple[object, ...], int] = {}
    found = []
    for index, (prompt, sample) in enumerate(zip(prompts, names, strict=True)):
        if prompt is None:
            found.append(index)
        elif images[index] or videos[index]:
            holder[sample] = index
            found.append(index)
        else:
            found.append(holder.get(sample, index))
    return found


def _lengths(column: pa.ChunkedArray) -> list[int]:
    return [length or 0 for length in pc.list_value_length(column).to_pylist()]


class Media:
    """Images and clips of a table's rows as arrays, converted lazily and cached."""

    def __init__(self, table: pa.Table) -> None:
        self._images, self._videos = table.column("images"), table.column("videos")
        self._rows = media_rows(table)
        self._cache: dict[int, tuple[tuple[NDArray[np.uint8], ...], tuple[Clip, ...]]] = {}

    def of(self, index: int) -> tuple[tuple[NDArray[np.uint8], ...], tuple[Clip, ...]]:
        """Images and clips of a row; rows of one sample share theirs."""
        row = self._rows[index]
        if row not in self._cache:
            self._cache[row] = rgb_images(self._images[row]), clips(self._videos[row])
        return self._cache[row]


def rgb_images(cell: pa.ListScalar) -> tuple[NDArray[np.uint8], ...]:
    """The images of one row, uint8 of shape (height, width, 3); copies, because Arrow buffers are read-only."""
    if cell.values is None:
        return ()
    images = []
    for image in cell.values:
        shape = (image["height"].as_py(), image["width"].as_py(), 3)
        images.append(np.frombuffer(image["rgb"].as_buffer(), dtype=np.uint8).reshape(shape).copy())
    return tuple(images)


def clips(cell: pa.ListScalar) -> tuple[Clip, ...]:
    """The clips of one row, each with frames uint8 (T, height, width, 3); copies."""
    if cell.values is None:
        return ()
    made = []
    for clip in cell.values:
        shape = (clip["num_frames"].as_py(), clip["height"].as_py(), clip["width"].as_py(), 3)
        frames = np.frombuffer(clip["rgb"].as_buffer(), dtype=np.uint8).reshape(shape).copy()
        made.append(Clip(frames, tuple(clip["timestamps_s"].as_py()), clip["fps"].as_py()))
    return tuple(made)
