"""Cuts the manifest deterministically into spans: read tasks of about equal size.

A span is a sequence of pieces; a piece is a range of rows of one file. Many small files share a span, a large Parquet
file is cut at its row groups (and inside a row group that is itself too large), a tar of unknown count is one piece.
The cut is a pure function of the manifest's columns; no file is opened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.manifest.done_bitmap import UNKNOWN, Bools, DoneBitmap, Ints

ASSUMED_SAMPLE_BYTES = 32 * 1024
"""Assumed bytes per sample when small files of unknown count are grouped."""
GROUP_ROWS_FACTOR = 64
"""A row group that fits the bytes of a span is cut only if it has more than this many times the rows of a span."""
TO_THE_END = -1
_PIECES_AT_ONCE = 1 << 18
"""Pieces that are in memory as 64-bit integers at the same time."""
_NONE = np.zeros(0, np.int64)

AnyInts = NDArray[np.signedinteger[Any]]


class Piece(NamedTuple):
    """Rows `start` to `stop` (exclusive; None: to the end) of the file with ordinal `file` in the manifest."""

    file: int
    start: int
    stop: int | None


Span = tuple[Piece, ...]


@dataclass(frozen=True)
class Spans:
    """All spans in order as flat arrays over pieces: `ends[i]` is one past the last piece of span i.

    `files`, `starts` and `stops` have the smallest integer types that hold their values: 6 bytes per whole file.
    """

    files: AnyInts
    starts: AnyInts
    stops: AnyInts
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    def kept(self, keep: Bools) -> Spans:
        """Return the spans with the pieces in the mask `keep`, without spans that have none."""
        ends = np.concatenate([[0], np.cumsum(keep)])[self.ends]
        return Spans(self.files[keep], self.starts[keep], self.stops[keep], ends[np.diff(ends, prepend=0) > 0])

    def columns(self, span: int) -> tuple[Ints, Ints, Ints]:
        """Return one span's files, starts and stops as arrays; a stop is `TO_THE_END` if the piece has none."""
        return self.pieces(int(self.ends[span - 1]) if span else 0, int(self.ends[span]))

    def pieces(self, low: int, high: int) -> tuple[Ints, Ints, Ints]:
        """Return files, starts and stops of the pieces from `low` to `high` as new arrays."""
        files, starts, stops = (array[low:high].astype(np.int64) for array in (self.files, self.starts, self.stops))
        return files, starts, stops

    def __getitem__(self, index: int) -> Span:
        columns = (column.tolist() for column in self.columns(range(len(self))[index]))
        return tuple(Piece(file, start, end_of(stop)) for file, start, stop in zip(*columns, strict=True))

    def __iter__(self) -> Iterator[Span]:
        return (self[index] for index in range(len(self)))


def end_of(stop: int) -> int | None:
    return None if stop == TO_THE_END else int(stop)


def joined(parts: Sequence[Spans]) -> Spans:
    """Return the spans of all parts, one part after the other."""
    firsts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    ends = [part.ends + first for part, first in zip(parts, firsts, strict=False)]

    def column(values: Iterator[AnyInts]) -> AnyInts:
        return _narrow(np.concatenate([_NONE, *values]))

    files, starts, stops = (column(getattr(part, name) for part in parts) for name in ("files", "starts", "stops"))
    return Spans(files, starts, stops, np.concatenate([_NONE, *ends]))


def changed(spans: Spans, change: Callable[[Ints, Ints, Ints], Bools]) -> Spans:
    """Return the spans after `change` has been applied to their pieces, some at a time.

    `change(files, starts, stops)` changes starts and stops in place and returns the mask of the pieces to keep.
    """
    starts, stops, masks = [], [], []
    for low in range(0, len(spans.files), _PIECES_AT_ONCE):
        columns = spans.pieces(low, low + _PIECES_AT_ONCE)
        masks.append(change(*columns))
        starts.append(_narrow(columns[1]))
        stops.append(_narrow(columns[2]))
    if not masks:
        return spans
    return Spans(spans.files, np.concatenate(starts), np.concatenate(stops), spans.ends).kept(np.concatenate(masks))


def _narrow(values: Ints) -> AnyInts:
    """Return the same values in the smallest signed type that holds them."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return values.astype(np.promote_types(np.min_scalar_type(min(low, -1)), np.min_scalar_type(min(-high - 1, -1))))


class _Writer:
    """Collects pieces into spans; a span is closed before it would exceed `max_rows` or `max_bytes`."""

    def __init__(self, max_rows: int = 0, max_bytes: int = 0) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self._columns = array("q"), array("q"), array("q")
        self._full: list[tuple[AnyInts, ...]] = []
        self._num_full = self._num_closed = 0
        self._ends = array("q")
        self._num_rows = self._num_bytes = 0

    def add(self, file: int, start: int, stop: int, num_rows: int = 0, num_bytes: int = 0) -> None:
        if self._num_rows + num_rows > self.max_rows or self._num_bytes + num_bytes > self.max_bytes:
            self.close()
        if len(self._columns[0]) == _PIECES_AT_ONCE:
            self._pack()
        for column, value in zip(self._columns, (file, start, stop), strict=True):
            column.append(value)
        self._num_rows += num_rows
        self._num_bytes += num_bytes

    def close(self) -> None:
        num_pieces = self._num_full + len(self._columns[0])
        if num_pieces > self._num_closed:
            self._ends.append(num_pieces)
            self._num_closed = num_pieces
        self._num_rows = self._num_bytes = 0

    def _pack(self) -> None:
        self._full.append(tuple(_narrow(np.array(column, np.int64)) for column in self._columns))
        self._num_full += len(self._columns[0])
        self._columns = array("q"), array("q"), array("q")

    def finish(self) -> Spans:
        self.close()
        self._pack()
        files, starts, stops = (np.concatenate(column) for column in zip(*self._full, strict=True))
        return Spans(files, starts, stops, np.array(self._ends, np.int64))


def _cut(
    group_rows: list[int], group_bytes: list[int], max_rows: int, max_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (start row, stop row, bytes) of the pieces of one large file.

    A row group is cut if it exceeds `max_bytes`, and for its rows only above `GROUP_ROWS_FACTOR * max_rows`, because
    reading a later part of a group also decodes the earlier parts.
    """
    start = num_rows = num_bytes = 0
    for rows, size in zip(group_rows, group_bytes, strict=True):
        if rows == 0:  # even if its bytes exceed a span
            continue
        too_big = rows > max_rows or size > max_bytes
        if num_rows and (too_big or num_rows + rows > max_rows or num_bytes + size > max_bytes):
            yield start, start + num_rows, num_bytes
            start, num_rows, num_bytes = start + num_rows, 0, 0
        if too_big:
            num_parts = min(rows, max(-(-rows // (GROUP_ROWS_FACTOR * max_rows)), -(-size // max_bytes)))
            for low, high in pairwise(start + rows * part // num_parts for part in range(num_parts + 1)):
                yield low, high, size // num_parts
            start += rows
        else:
            num_rows, num_bytes = num_rows + rows, num_bytes + size
    if num_rows:
        yield start, start + num_rows, num_bytes


def plan(files: pa.Table, max_rows: int, max_bytes: int, first: int = 0) -> Spans:
    """Cut files (columns of `manifest.SCHEMA`) into spans of at most about `max_rows` rows and `max_bytes` bytes.

    `first` is the ordinal of the first file.
    """
    writer = _Writer(max_rows, max_bytes)
    ordinal = first
    for batch in files.select(["size_bytes", "num_samples", "row_group_rows", "row_group_bytes"]).to_batches(65_536):
        sizes, counts = batch.column(0).to_pylist(), batch.column(1).to_pylist()
        for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            group_rows = batch.column(2)[index].as_py() or [] if count is not None and count > 1 else []
            group_bytes = batch.column(3)[index].as_py() if group_rows else []
            num_bytes = sum(group_bytes) if group_rows else size
            num_rows = max(1, size // ASSUMED_SAMPLE_BYTES) if count is None else count
            if group_rows and (num_rows > max_rows or num_bytes > max_bytes):
                for start, stop, piece_bytes in _cut(group_rows, group_bytes, max_rows, max_bytes):
                    writer.add(ordinal, start, stop, stop - start, piece_bytes)
            elif count != 0:
                writer.add(ordinal, 0, TO_THE_END, num_rows, num_bytes)
            ordinal += 1
    return writer.finish()


def take(spans: Spans, limit: int, num_samples: Callable[[int, int], int]) -> Spans:
    """Cut the spans to the first `limit` samples.

    `num_samples(file, at_most)` returns a file's count; it is called only for pieces that run to the end of their file.
    """
    writer = _Writer()
    num_left = limit
    for span in spans:
        for file, start, stop in span:
            if num_left <= 0:
                break
            end = min(num_samples(file, start + num_left) if stop is None else stop, start + num_left)
            if end > start:
                runs_to_end = stop is None and end < start + num_left
                writer.add(file, start, TO_THE_END if runs_to_end else end)
                num_left -= end - start
        writer.close()
        if num_left <= 0:
            break
    return writer.finish()


def remaining(spans: Spans, done: DoneBitmap) -> Spans:
    """Remove done rows: every piece is cut to its first and last row that is not done, and finished pieces are dropped.

    Done rows in between remain; the reader skips them.
    """

    def change(files: Ints, starts: Ints, stops: Ints) -> Bools:
        counts = done.counts[files]
        sizes = np.where(stops == TO_THE_END, counts, stops) - starts
        num_done = done.num_in(files, starts, stops)
        keep = np.asarray((num_done < sizes) | (counts == UNKNOWN))
        for index in np.flatnonzero(keep & ((num_done > 0) | (counts == UNKNOWN))).tolist():
            if counts[index] == UNKNOWN and stops[index] == TO_THE_END:
                continue
            start = int(starts[index])
            rows = done.rows(int(files[index]), start, end_of(stops[index]))
            open_rows = np.flatnonzero(~rows)
            if not len(open_rows):
                keep[index] = False
                continue
            starts[index] = start + open_rows[0]
            if open_rows[-1] + 1 < len(rows):
                stops[index] = start + open_rows[-1] + 1
        return keep

    return changed(spans, change)


def num_missing(spans: Spans, done: DoneBitmap) -> int | None:
    """Return how many samples of the spans are not done; None if some file's count is unknown."""
    total = 0
    for file, start, stop in (piece for span in remaining(spans, done) for piece in span):
        if stop is None and done.counts[file] == UNKNOWN:
            return None
        total += int((~done.rows(file, start, stop)).sum())
    return total


def num_samples(spans: Spans, counts: Ints) -> int | None:
    """Return the number of samples of the spans; None if some file's count is unknown."""
    total = 0
    for low in range(0, len(spans.files), _PIECES_AT_ONCE):
        files, starts, stops = spans.pieces(low, low + _PIECES_AT_ONCE)
        ends = np.where(stops == TO_THE_END, counts[files], stops)
        if (ends == UNKNOWN).any():
            return None
        total += int((ends - starts).sum())
    return total
