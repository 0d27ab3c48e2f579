"""Converts images and clips of the stage `decoded` to arrays; the prompts of a sample share one copy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.inputs.clip import Clip

FILLER_INDEX = -1
"""`row_index` of a filler row (`pipeline.media.row_weights`); rows of the source have indices from 0."""
_SAMPLE = ("source", "row_index", "clip_index")


def without_fillers(table: pa.Table) -> pa.Table:
    """Return a table without its filler rows."""
    indices = table["row_index"]
    if not pc.any(pc.equal(indices, FILLER_INDEX)).as_py():
        return table
    # Slices instead of `filter`, which would copy the media.
    kept = pc.not_equal(indices, FILLER_INDEX).to_numpy().astype(np.int8)
    bounds = np.flatnonzero(np.diff(kept, prepend=0, append=0)).reshape(-1, 2).tolist()
    return pa.concat_tables([table.slice(0, 0), *(table.slice(start, stop - start) for start, stop in bounds)])


def media_rows(table: pa.Table) -> list[int]:
    """Return the index of the row that holds each row's images and clips: the row itself or its sample's first row."""
    prompts = table.column("prompt_index")
    if prompts.null_count == table.num_rows:
        return list(range(table.num_rows))
    samples = zip(*(table.column(name).to_pylist() for name in _SAMPLE), strict=True)
    lengths = zip(*(pc.list_value_length(table.column(name)).to_pylist() for name in ("images", "videos")))
    holders: dict[tuple[object, ...], int] = {}
    found = []
    for index, (prompt, sample, counts) in enumerate(zip(prompts.to_pylist(), samples, lengths, strict=True)):
        if prompt is None or any(counts):
            holders[sample] = index
        found.append(holders.get(sample, index))
    return found


class Media:
    """Images and clips of a table's rows as arrays, converted lazily and cached."""

    def __init__(self, table: pa.Table) -> None:
        self._images, self._videos = table.column("images"), table.column("videos")
        self._rows = media_rows(table)
        self._cache: dict[int, tuple[tuple[NDArray[np.uint8], ...], tuple[Clip, ...]]] = {}

    def of(self, index: int) -> tuple[tuple[NDArray[np.uint8], ...], tuple[Clip, ...]]:
        """Return the images and clips of a row; rows of one sample share the same arrays."""
        row = self._rows[index]
        if row not in self._cache:
            self._cache[row] = rgb_images(self._images[row]), clips(self._videos[row])
        return self._cache[row]


def rgb_images(cell: pa.ListScalar) -> tuple[NDArray[np.uint8], ...]:
    """Return the images of one row, uint8 (height, width, 3), as copies, because Arrow buffers are read-only."""
    return tuple(_pixels(image, "height", "width") for image in cell.values or ())


def clips(cell: pa.ListScalar) -> tuple[Clip, ...]:
    """Return copies of the clips of one row, each with frames uint8 (T, height, width, 3)."""
    return tuple(
        Clip(
            _pixels(clip, "num_frames", "height", "width"),
            tuple(clip["timestamps_s"].as_py()),
            clip["fps"].as_py(),
        )
        for clip in cell.values or ()
    )


def _pixels(media: pa.StructScalar, *sizes: str) -> NDArray[np.uint8]:
    shape = (*(media[name].as_py() for name in sizes), 3)
    return np.frombuffer(media["rgb"].as_buffer(), dtype=np.uint8).reshape(shape).copy()
