"""Converts images, clips and processor outputs of the stage `decoded` to arrays, which a sample's prompts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.inputs.clip import Clip

if TYPE_CHECKING:
    from models.inputs.packing import Packed, PackedInputs

FILLER_INDEX = -1
"""`row_index` of a filler row (`pipeline.media.row_weights`); rows of the source have indices from 0."""
_SAMPLE = ("source", "row_index", "clip_index")


def without_fillers(table: pa.Table) -> pa.Table:
    """Return a table without its filler rows."""
    indices = table["row_index"]
    if not pc.any(pc.equal(indices, FILLER_INDEX)).as_py():
        return table
    # Slices instead of `filter`, which would copy the media.
    is_row = pc.not_equal(indices, FILLER_INDEX).to_numpy().astype(np.int8)
    bounds = np.flatnonzero(np.diff(is_row, prepend=0, append=0)).reshape(-1, 2).tolist()
    return pa.concat_tables([table.slice(0, 0), *(table.slice(start, stop - start) for start, stop in bounds)])


def media_rows(table: pa.Table) -> list[int]:
    """Return the index of the row that holds each row's images and clips: the row itself or its sample's first row."""
    prompts = table.column("prompt_index")
    if prompts.null_count == table.num_rows:
        return list(range(table.num_rows))
    samples = zip(*(table.column(name).to_pylist() for name in _SAMPLE), strict=True)
    lengths = zip(*(pc.list_value_length(table.column(name)).to_pylist() for name in ("images", "videos")))
    holders: dict[tuple[object, ...], int] = {}
    indices = []
    for index, (prompt, sample, counts) in enumerate(zip(prompts.to_pylist(), samples, lengths, strict=True)):
        if prompt is None or any(counts):
            holders[sample] = index
        indices.append(holders.get(sample, index))
    return indices


def holder_rows(table: pa.Table) -> list[int]:
    """Return, for each row, the index of its sample's first row with processor outputs; the row itself if none has."""
    has_outputs = pc.is_valid(table.column("packed_inputs")).to_pylist()
    samples = zip(*(table.column(name).to_pylist() for name in _SAMPLE), strict=True)
    holders: dict[tuple[object, ...], int] = {}
    return [
        holders.setdefault(sample, index) if valid else index
        for index, (sample, valid) in enumerate(zip(samples, has_outputs, strict=True))
    ]


@dataclass(frozen=True)
class RowMedia:
    """Images and clips of one row; `prompt` and `inputs` are its rendered prompt and processor outputs, if the decoding
    task made them."""

    images: tuple[NDArray[np.uint8], ...]
    videos: tuple[Clip, ...]
    prompt: str | None = None
    inputs: PackedInputs | None = None


class Media:
    """Images, clips and processor outputs of a table's rows, as copies; converted lazily, media of a sample once."""

    def __init__(self, table: pa.Table) -> None:
        self._images, self._videos = table.column("images"), table.column("videos")
        self._inputs = table.column("packed_inputs")
        self._rows, self._holders = media_rows(table), holder_rows(table)
        self._cache: dict[int, tuple[tuple[NDArray[np.uint8], ...], tuple[Clip, ...]]] = {}
        self._held: dict[int, dict[str, Packed]] = {}

    def of(self, index: int) -> RowMedia:
        """Return the media of a row; rows of one sample share the same arrays."""
        row = self._rows[index]
        if row not in self._cache:
            self._cache[row] = rgb_images(self._images[row]), clips(self._videos[row])
        cell = self._inputs[index]
        if not cell.is_valid:
            return RowMedia(*self._cache[row])
        from models.inputs.packing import PackedInputs  # imports torch, which the driver does not need

        holder = self._holders[index]
        if holder not in self._held:
            self._held[holder] = _tensors(self._inputs[holder], {})
        tensors = self._held[holder] if holder == index else _tensors(cell, self._held[holder])
        inputs = PackedInputs(tensors, cell["num_images"].as_py(), tuple(cell["num_frames"].as_py()))
        return RowMedia(*self._cache[row], cell["prompt"].as_py(), inputs)


def _tensors(cell: pa.StructScalar, shared: dict[str, Packed]) -> dict[str, Packed]:
    """Return copies of the tensors of one row by name; those without data are the ones of `shared`."""
    from models.inputs.packing import NUM_LEVELS, Packed, bits_dtype

    tensors = {}
    for tensor in cell["tensors"]:
        name = tensor["name"].as_py()
        if not tensor["data"].is_valid:
            tensors[name] = shared[name]
            continue
        dtype, shape = tensor["dtype"].as_py(), tuple(tensor["shape"].as_py())
        data = _copied(tensor["data"], tensor["stored_dtype"].as_py(), tensor["stored_shape"].as_py())
        levels = None
        if tensor["levels"].is_valid:
            levels = _copied(tensor["levels"], bits_dtype(dtype), (data.shape[1], NUM_LEVELS))
        tensors[name] = Packed(dtype, shape, data, levels)
    return tensors


def _copied(data: pa.Scalar, dtype: Any, shape: Any) -> NDArray[Any]:
    return np.frombuffer(data.as_buffer(), dtype).reshape(shape).copy()


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
