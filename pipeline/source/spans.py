"""Spans: the manifest cut into read tasks of about equal size, the same cut every time.

A span is a run of pieces; a piece is one file from a start row to a stop row. Many small files share a span, a big
Parquet file is cut at its row groups (and inside one that is itself too big), a tar of unknown count is one piece. A
pure function of the manifest's columns: opens nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
import pyarrow as pa

from pipeline.source.done_bitmap import UNKNOWN, DoneSet, Ints

ASSUMED_SAMPLE_BYTES = 32 * 1024
"""What a sample is taken to weigh when small files of unknown count are grouped."""

GROUP_ROWS_FACTOR = 64
"""A row group within the bytes of a span is left whole up to so many times the rows of one."""

TO_THE_END = -1


class Piece(NamedTuple):
    """Rows `start` to `stop` (None: to the end) of the file with this ordinal in the manifest."""

    file: int
    start: int
    stop: int | None


Span = tuple[Piece, ...]


@dataclass(frozen=True)
class Spans(Sequence[Span]):
    """All spans in order, held as flat arrays: `ends[i]` is one past the last piece of span i."""

    files: array[int]
    starts: array[int]
    stops: array[int]
    ends: array[int]

    def __len__(self) -> int:
        return len(self.ends)

    def columns(self, span: int) -> tuple[Ints, Ints, Ints]:
        """One span's files, starts and stops (`TO_THE_END` where a piece has none), without objects for pieces."""
        first = self.ends[span - 1] if span else 0
        found = (
            np.frombuffer(column, np.int64)[first : self.ends[span]] for column in (self.files, self.starts, self.stops)
        )
        files, starts, stops = found
        return files, starts, stops

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"span {index} of {len(self)}")
        first = self.ends[index - 1] if index else 0
        return tuple(
            Piece(self.files[i], self.starts[i], None if self.stops[i] == TO_THE_END else self.stops[i])
            for i in range(first, self.ends[index])
        )


class _Writer:
    """Collects pieces into spans; a span is closed before it would pass either bound."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.files, self.starts, self.stops, self.ends = array("q"), array("q"), array("q"), array("q")
        self._num_rows = self._num_bytes = 0

    def add(self, file: int, start: int, stop: int, num_rows: int, num_bytes: int) -> None:
        if self._num_rows + num_rows > self.max_rows or self._num_bytes + num_bytes > self.max_bytes:
            self.close()
        self.files.append(file)
        self.starts.append(start)
        self.stops.append(stop)
        self._num_rows += num_rows
        self._num_bytes += num_bytes

    def close(self) -> None:
        if len(self.files) > (self.ends[-1] if self.ends else 0):
            self.ends.append(len(self.files))
        self._num_rows = self._num_bytes = 0


def _cut(
    group_rows: list[int], group_bytes: list[int], max_rows: int, max_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """(start row, stop row, bytes) of the pieces of one big file.

    A group is cut inside for its bytes, and for its rows only where they are very many: the later parts of a group cost
    reading the earlier ones.
    """
    start = num_rows = num_bytes = 0
    most_rows = GROUP_ROWS_FACTOR * max_rows
    for rows, size in zip(group_rows, group_bytes, strict=True):
        too_big = rows > max_rows or size > max_bytes
        if num_rows and (too_big or num_rows + rows > max_rows or num_bytes + size > max_bytes):
            yield start, start + num_rows, num_bytes
            start, num_rows, num_bytes = start + num_rows, 0, 0
        if too_big:
            num_parts = min(rows, max(-(-rows // most_rows), -(-size // max_bytes)))
            bounds = [start + rows * part // num_parts for part in range(num_parts + 1)]
            for low, high in pairwise(bounds):
                yield low, high, size // num_parts
            start += rows
        else:
            num_rows, num_bytes = num_rows + rows, num_bytes + size
    if num_rows:
        yield start, start + num_rows, num_bytes


def plan(files: pa.Table, max_rows: int, max_bytes: int) -> Spans:
    """Cut the manifest's files (columns of `manifest.SCHEMA`) into spans of at most about `max_rows` or `max_bytes`."""
    writer = _Writer(max_rows, max_bytes)
    ordinal = 0
    for batch in files.select(["size_bytes", "num_samples", "row_group_rows", "row_group_bytes"]).to_batches(65_536):
        sizes = batch.column(0).to_pylist()
        counts = batch.column(1).to_pylist()
        grouped = batch.column(2)
        for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            group_rows = grouped[index].as_py() or [] if count is not None and count > 1 else []
            group_bytes = batch.column(3)[index].as_py() if group_rows else []
            num_bytes = sum(group_bytes) if group_rows else size
            num_rows = max(1, size // ASSUMED_SAMPLE_BYTES) if count is None else count
            if group_rows and (num_rows > max_rows or num_bytes > max_bytes):
                for start, stop, piece_bytes in _cut(group_rows, group_bytes, max_rows, max_bytes):
                    writer.add(ordinal, start, stop, stop - start, piece_bytes)
            elif count != 0:
                writer.add(ordinal, 0, TO_THE_END, num_rows, num_bytes)
            ordinal += 1
    writer.close()
    return Spans(writer.files, writer.starts, writer.stops, writer.ends)


def take(spans: Spans, limit: int, num_samples: Callable[[int, int], int]) -> Spans:
    """The spans of the first `limit` samples.

    `num_samples(file, at_most)` returns a file's count; it is called only for pieces that run to the end of their file.
    """
    files, starts, stops, ends = array("q"), array("q"), array("q"), array("q")
    left = limit
    for span in spans:
        for file, start, stop in span:
            if left <= 0:
                break
            end = stop if stop is not None else num_samples(file, start + left)
            end = min(end, start + left)
            if end > start:
                whole = stop is None and end < start + left
                files.append(file)
                starts.append(start)
                stops.append(TO_THE_END if whole else end)
                left -= end - start
        if len(files) > (ends[-1] if ends else 0):
            ends.append(len(files))
        if left <= 0:
            break
    return Spans(files, starts, stops, ends)


def remaining(spans: Spans, done: DoneSet) -> Spans:
    """The same spans without done rows: pieces cut to the first and last row that is not done, none of finished ones.

    Done rows in between stay inside; the reader skips them.
    """
    files, starts, stops = (np.array(column, np.int64) for column in (spans.files, spans.starts, spans.stops))
    counts = done.counts[files]
    sizes = np.where(stops == TO_THE_END, counts, stops) - starts
    num_done = done.num_in(files, starts, stops)
    keep = (num_done < sizes) | (counts == UNKNOWN)
    for place in np.flatnonzero(keep & ((num_done > 0) | (counts == UNKNOWN))).tolist():
        file, start, stop = int(files[place]), int(starts[place]), int(stops[place])
        rows = done.rows(file, start, None if stop == TO_THE_END else stop)
        if counts[place] == UNKNOWN and stop == TO_THE_END:
            continue
        left = np.flatnonzero(~rows)
        if not len(left):
            keep[place] = False
            continue
        starts[place] = start + left[0]
        if left[-1] + 1 < len(rows):
            stops[place] = start + left[-1] + 1
    ends = np.cumsum(keep)[np.array(spans.ends, np.int64) - 1] if len(spans.ends) else np.zeros(0, np.int64)
    ends = ends[np.diff(ends, prepend=0) > 0]
    return Spans(*(array("q", column.tolist()) for column in (files[keep], starts[keep], stops[keep], ends)))


def num_missing(spans: Spans, done: DoneSet) -> int | None:
    """How many samples of the spans are not done; None where the end of a file is not known."""
    left = remaining(spans, done)
    total = 0
    for file, start, stop in zip(left.files, left.starts, left.stops, strict=True):
        if stop == TO_THE_END and done.counts[file] == UNKNOWN:
            return None
        total += int((~done.rows(file, start, None if stop == TO_THE_END else stop)).sum())
    return total
