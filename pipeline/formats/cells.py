"""Limits the values of columns of Arrow batches: a value that is too large becomes its row's error, undecoded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from pipeline.formats import columns
from pipeline.formats.kind import ReadSpec
from pipeline.formats.limits import DATA_URI_FACTOR, TEXT_MAX_BYTES
from pipeline.formats.value_sizes import value_bytes
from pipeline.rows.schemas import RowError

MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""Maximum bytes of the values of a chunk of more than one row."""
REFERENCE_BYTES = 8
"""Bytes that an item of a list takes in Python, at least."""


class Cells:
    """The columns `names` of a batch, with the decoded size of every value."""

    def __init__(self, spec: ReadSpec, batch: pa.RecordBatch, names: list[str]) -> None:
        self._spec, self._batch = spec, batch
        media = spec.source.columns
        self._media = {
            name: what for name, what in ((media.video, "video"), (media.image, "image")) if name is not None
        }
        python = {*spec.fields, *self._media, spec.source.id_column}
        self._sizes = {
            name: value_bytes(batch.column(name), REFERENCE_BYTES if name in python else 1)
            for name in names
            if name in batch.schema.names
        }

    @property
    def names(self) -> Collection[str]:
        return self._sizes.keys()

    @property
    def media(self) -> dict[str, str]:
        """The columns of images and videos, and which of them each holds."""
        return self._media

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of consecutive rows of at most `MAX_CHUNK_BYTES`, or one row; larger values count nothing."""
        total = np.zeros(self._batch.num_rows)
        for name, sizes in self._sizes.items():
            total += np.where(sizes > self._limit(name), 0.0, sizes)
        ends = np.cumsum(total)
        low = 0
        while low < len(ends):
            before = ends[low - 1] if low else 0.0
            high = max(low + 1, int(np.searchsorted(ends, before + MAX_CHUNK_BYTES, side="right")))
            yield low, high
            low = high

    def column(self, name: str, low: int, high: int) -> tuple[pa.Array, dict[int, RowError]]:
        """Return a column of a range with plain types, and errors by index in the range. Values that are too large are
        null; text that is not UTF-8 is not."""
        sizes, values = self._sizes[name][low:high], self._batch.column(name).slice(low, high - low)
        is_large: NDArray[np.bool_] = sizes > self._limit(name)
        errors = {row: self._too_large(name, sizes[row]) for row in np.flatnonzero(is_large).tolist()}
        values = _plain_without(values, is_large) if errors else _plain(values)
        for row in invalid_rows(values):
            errors[row] = RowError("invalid_value", f"the column {name!r} holds text that is not valid UTF-8")
        return values, errors

    def _limit(self, name: str) -> int:
        """Return the maximum bytes of a value of a column."""
        source, what = self._spec.source, self._media.get(name)
        kind = columns.unpacked(self._batch.schema.field(name).type)
        max_bytes = source.video.max_video_bytes if what == "video" else source.max_image_bytes
        if what is None:
            return max(TEXT_MAX_BYTES, max_bytes) if columns.holds_bytes(kind) else TEXT_MAX_BYTES
        if columns.is_list(kind):
            return max(max_bytes, source.max_row_bytes) + TEXT_MAX_BYTES
        return TEXT_MAX_BYTES + max_bytes * (DATA_URI_FACTOR if columns.is_text(kind) else 1)

    def _too_large(self, name: str, size: float) -> RowError:
        what = self._media.get(name)
        code = "invalid_value" if what is None else f"{what}_too_large"
        if what == "image" and columns.is_list(columns.unpacked(self._batch.schema.field(name).type)):
            code = "row_too_large"
        return RowError(code, f"the column {name!r} holds a value of {size:.0f} bytes, more than {self._limit(name)}")


def _plain(values: pa.Array) -> pa.Array:
    return columns.plain_values(values.dictionary_decode() if pt.is_dictionary(values.type) else values)


def _plain_without(values: pa.Array, is_left_out: NDArray[np.bool_]) -> pa.Array:
    """Return values of a plain type, null where they are left out; only the other ones are decoded."""
    edges = [0, *(np.flatnonzero(np.diff(is_left_out)) + 1).tolist(), len(values)]
    kind = _plain(values.slice(0, 0)).type
    parts = [
        pa.nulls(high - low, kind) if is_left_out[low] else _plain(values.slice(low, high - low))
        for low, high in pairwise(edges)
    ]
    return pa.concat_arrays(parts)


def invalid_rows(values: pa.Array) -> set[int]:
    """Return the rows whose values fail Arrow's validation, in practice text that is not UTF-8."""

    def is_valid(part: pa.Array) -> bool:
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            return False
        return True

    if is_valid(values):
        return set()
    # A slice shares the buffers of its parent, so only a copy is validated row by row.
    rows = ((index, values.slice(index, 1)) for index in range(len(values)))
    return {index for index, row in rows if not is_valid(pa.concat_arrays([row, row.slice(0, 0)]))}
