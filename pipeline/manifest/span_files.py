"""Holds the pieces of one span as columns, in which they are sent to a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.formats.kind import Entry, FilePiece
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import DoneBitmap, Ints

if TYPE_CHECKING:
    from pipeline.manifest.manifest import Manifest


@dataclass(frozen=True)
class SpanFiles:
    """The pieces of one span. It is pickled as Arrow columns and unpickled as a list of pieces, because one Python
    object per piece would not fit in the driver's memory for ten million files."""

    manifest: Manifest
    spans: spans.Spans
    number: int
    done: DoneBitmap | None = None

    @property
    def num_bytes(self) -> int:
        files, _, _ = self.spans.columns(self.number)
        sizes = self.manifest.files["size_bytes"].slice(int(files[0]), int(files[-1] - files[0]) + 1)
        return int(pc.sum(sizes).as_py())

    def __iter__(self) -> Iterator[FilePiece]:
        rebuild, arguments = self.__reduce__()
        return iter(rebuild(*arguments))

    def __reduce__(self) -> tuple[Callable[..., list[FilePiece]], tuple[Any, ...]]:
        files, starts, stops = self.spans.columns(self.number)
        extras: dict[int, tuple[Entry, bytes]] = {}
        is_partial = starts > 0 if self.done is None else np.ones(len(files), bool)
        for index in np.flatnonzero(is_partial).tolist():
            file, start = int(files[index]), int(starts[index])
            done_bits = b""
            if self.done is not None:
                rows_done = self.done.rows(file, start, spans.end_of(stops[index]))
                done_bits = np.packbits(rows_done).tobytes() if rows_done.any() else b""
            if start or done_bits:
                extras[index] = (self.manifest.entry(file, start) if start else Entry(), done_bits)
        first = int(files[0])
        listed = self.manifest.files.slice(first, int(files[-1]) - first + 1).take(pa.array(files - first))
        columns = [listed[name].combine_chunks() for name in LISTED_COLUMNS]
        return file_pieces, (columns, files, starts, stops, extras)


LISTED_COLUMNS = ("path", "num_samples", "size_bytes", "token", "repeated_rows")


def file_pieces(
    listed: list[pa.Array], files: Ints, starts: Ints, stops: Ints, extras: dict[int, tuple[Entry, bytes]]
) -> list[FilePiece]:
    """Unpack the pieces of `SpanFiles` from columns of the listing; `extras` is (entry, done bits) by piece index."""
    pieces = []
    columns = (*(column.to_pylist() for column in listed), files.tolist(), starts.tolist(), stops.tolist())
    for index, values in enumerate(zip(*columns, strict=True)):
        path, count, size, token, repeated, file, start, end = values
        stop = spans.end_of(end)
        entry, done_bits = extras.get(index, (Entry(), b""))
        repeated_rows = frozenset(row for row in repeated if start <= row and (stop is None or row < stop))
        pieces.append(FilePiece(path, start, stop, count, entry, size, token, repeated_rows, file, done_bits))
    return pieces
