"""Cuts a manifest into shards: contiguous ranges of samples that several drivers of one job process independently.

The cut of a manifest part is computed once, when the part is written, and stored with it, so that it never changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from pipeline.manifest.done_bitmap import UNKNOWN, Bools, Ints
from pipeline.manifest.spans import TO_THE_END, Spans, changed, joined, plan
from pipeline.storage.damage import parse_json
from pipeline.storage.shard import MAX_SHARDS


class Position(NamedTuple):
    """A sample's position in the source: the ordinal of its file in the manifest, and its row."""

    file: int
    row: int


@dataclass(frozen=True)
class Cut:
    """The cut of one manifest part: shard i has the samples from `bounds[i]` to `bounds[i + 1]` (exclusive)."""

    bounds: tuple[Position, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def range_of(self, shard: int) -> tuple[Position, Position]:
        return self.bounds[shard], self.bounds[shard + 1]

    def to_json(self) -> bytes:
        return json.dumps(self.bounds).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the cut that `to_json` has made; ValueError for other data."""
        bounds = parse_json(data)
        is_list = isinstance(bounds, list) and 2 < len(bounds) <= MAX_SHARDS + 1
        if not is_list or not all(isinstance(bound, list) and [*map(type, bound)] == [int, int] for bound in bounds):
            raise ValueError("its cut into shards is no list of positions")
        return cls(tuple(Position(*bound) for bound in bounds))

    def check(self, first: int, counts: Ints) -> None:
        """Raise ValueError unless this cuts files with these counts, of which the first has the ordinal `first`."""
        end = first + len(counts)
        is_sorted = list(self.bounds) == sorted(self.bounds)
        ends = (Position(first, 0), Position(end, 0))
        if not is_sorted or (self.bounds[0], self.bounds[-1]) != ends:
            raise ValueError("its cut into shards is not one of its files")
        if any(row and (file >= end or not 0 < row < counts[file - first]) for file, row in self.bounds):
            raise ValueError("its cut into shards is beyond the end of a file")


def cut(counts: Ints, sizes: Ints, first: int, num_shards: int) -> Cut:
    """Cut the files of a manifest part into shards of equal numbers of samples, or of about equal bytes if the number
    of samples of a file is `UNKNOWN`; then no file is cut.

    `counts` and `sizes` are the samples and bytes of the part's files, `first` is the ordinal of the first file.
    """
    if (counts == UNKNOWN).any():
        ends = np.cumsum(np.maximum(sizes, 1))
        goals = [int(ends[-1]) * number // num_shards for number in range(1, num_shards)]
        inner = [Position(first + int(file), 0) for file in np.searchsorted(ends, goals, side="right")]
    else:
        ends = np.cumsum(counts)
        goals = [int(ends[-1]) * number // num_shards for number in range(1, num_shards)]
        files = np.searchsorted(ends, goals, side="right")
        inner = [
            Position(first + int(file), goal - int(ends[file] - counts[file]))
            if file < len(ends)
            else _end(first, ends)
            for file, goal in zip(files, goals, strict=True)
        ]
    return Cut((Position(first, 0), *inner, _end(first, ends)))


def _end(first: int, files: Ints) -> Position:
    return Position(first + len(files), 0)


def plan_shard(files: pa.Table, cuts: tuple[Cut, ...], shard: int, max_rows: int, max_bytes: int) -> Spans:
    """Cut a shard's files into spans like `spans.plan`; pieces end at the bounds of the shard."""
    if not cuts:
        return plan(files, max_rows, max_bytes)
    parts = []
    for low, high in (cut.range_of(shard) for cut in cuts):
        shard_files = files.slice(low.file, high.file - low.file + (high.row > 0))
        parts.append(_inside(plan(shard_files, max_rows, max_bytes, low.file), low, high))
    return joined(parts)


def _inside(spans: Spans, low: Position, high: Position) -> Spans:
    """Cut pieces at the bounds of a range of samples."""

    def change(files: Ints, starts: Ints, stops: Ints) -> Bools:
        at_start, at_end = files == low.file, files == high.file
        is_inside = ~at_start | (stops == TO_THE_END) | (stops > low.row)
        is_inside &= ~at_end | (starts < high.row)
        starts[at_start] = np.maximum(starts[at_start], low.row)
        stops[at_end] = np.where(stops[at_end] == TO_THE_END, high.row, np.minimum(stops[at_end], high.row))
        return np.asarray(is_inside)

    return changed(spans, change)


def rows_of(cuts: tuple[Cut, ...], shard: int, file: int) -> tuple[int, int | None]:
    """Return the first row of a file in a shard, and the row after the last one (None: all rows to the end)."""
    for low, high in (cut.range_of(shard) for cut in cuts):
        if low.file <= file <= high.file and (file < high.file or high.row):
            return (low.row if file == low.file else 0), (high.row if file == high.file else None)
    return (0, 0) if cuts else (0, None)
