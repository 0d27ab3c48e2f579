"""The done bitmap: one bit for every sample of a manifest, and the positions of files in it.

Sample `row` of file `file` has the ordinal `starts[file] + row`. Files of unknown count have bits of their own, which
grow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNKNOWN = -1
_LOOKUP_CHUNK = 1 << 20
_NUM_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


class DoneSet:
    """A set of (file, row); `counts` are the samples of every file, `UNKNOWN` if only reading gives the number."""

    def __init__(self, counts: Ints) -> None:
        self.counts = counts
        self._starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(np.maximum(counts, 0), out=self._starts[1:])
        self._bits = np.zeros((int(self._starts[-1]) + 7) // 8, np.uint8)
        self._open: dict[int, Bools] = {}
        self._counted: Ints | None = None

    def __len__(self) -> int:
        return int(_NUM_BITS[self._bits].sum(dtype=np.int64)) + sum(int(bits.sum()) for bits in self._open.values())

    def add(self, files: Ints, rows: Ints) -> Bools:
        """Put samples in; for each, whether it was there already or came before among these.

        Raises:
            ValueError: a file has no such row.
        """
        known = self._check(files, rows)
        repeated = np.zeros(len(files), bool)
        ordinals = self._starts[files[known]] + rows[known]
        again = np.ones(len(ordinals), bool)
        if (np.diff(ordinals) > 0).all():  # mostly, and sorting is what takes the time
            unique, first = ordinals, np.arange(len(ordinals))
        else:
            unique, first = np.unique(ordinals, return_index=True)
        again[first] = self._get(unique)
        repeated[known] = again
        if len(unique):
            places, firsts = np.unique(unique >> 3, return_index=True)
            self._bits[places] |= np.bitwise_or.reduceat(np.left_shift(1, unique & 7).astype(np.uint8), firsts)
        for place in np.flatnonzero(~known):
            file, row = int(files[place]), int(rows[place])
            bits = self._open.get(file, np.zeros(0, bool))
            if row >= len(bits):
                bits = np.concatenate([bits, np.zeros(max(row + 1, 2 * len(bits)) - len(bits), bool)])
            repeated[place] = bits[row]
            bits[row] = True
            self._open[file] = bits
        self._counted = None
        return repeated

    def has(self, files: Ints, rows: Ints) -> Bools:
        """Which of these samples are in.

        Raises:
            ValueError: a file has no such row.
        """
        known = self._check(files, rows)
        found = np.zeros(len(files), bool)
        found[known] = self._get(self._starts[files[known]] + rows[known])
        for place in np.flatnonzero(~known):
            bits = self._open.get(int(files[place]), np.zeros(0, bool))
            found[place] = rows[place] < len(bits) and bits[rows[place]]
        return found

    def merge(self, other: DoneSet) -> None:
        """Put in what another set of the same files holds."""
        np.bitwise_or(self._bits, other._bits, out=self._bits)
        for file, bits in other._open.items():
            mine = self._open.get(file, np.zeros(0, bool))
            both = np.zeros(max(len(bits), len(mine)), bool)
            both[: len(mine)] |= mine
            both[: len(bits)] |= bits
            self._open[file] = both
        self._counted = None

    def rows(self, file: int, start: int, stop: int | None) -> Bools:
        """For each row of a piece of a file, whether it is in the set; up to the last such row if the end is
        unknown."""
        if self.counts[file] == UNKNOWN:
            bits = self._open.get(file, np.zeros(0, bool))
            stop = int(np.flatnonzero(bits)[-1]) + 1 if stop is None and bits.any() else stop or 0
            found = np.zeros(max(0, stop - start), bool)
            part = bits[start:stop]
            found[: len(part)] = part
            return found
        end = int(self.counts[file]) if stop is None else stop
        return self._get(self._starts[file] + np.arange(start, end))

    def is_whole(self, file: int) -> bool:
        """Whether all samples of a file are in; never of one whose count is not known."""
        return self.counts[file] != UNKNOWN and bool(self.rows(file, 0, None).all())

    def num_in(self, files: Ints, starts: Ints, stops: Ints) -> Ints:
        """How many samples of each piece are in; pieces of files whose count is not known count as none."""
        if self._counted is None:
            self._counted = np.concatenate([[0], np.cumsum(_NUM_BITS[self._bits], dtype=np.int64)])
        known = self.counts[files] != UNKNOWN
        low, high = self._starts[files] + starts, self._starts[files] + np.where(stops < 0, self.counts[files], stops)
        return np.where(known, self._num_before(high) - self._num_before(np.minimum(low, high)), 0)

    def _num_before(self, ordinals: Ints) -> Ints:
        assert self._counted is not None
        byte = ordinals >> 3
        padded = np.append(self._bits, np.uint8(0))
        rest = padded[np.minimum(byte, len(self._bits))] & (np.left_shift(1, ordinals & 7) - 1).astype(np.uint8)
        before: Ints = self._counted[np.minimum(byte, len(self._bits))] + _NUM_BITS[rest]
        return before

    def _get(self, ordinals: Ints) -> Bools:
        found: Bools = (self._bits[ordinals >> 3] >> (ordinals & 7).astype(np.uint8) & 1).astype(bool)
        return found

    def _check(self, files: Ints, rows: Ints) -> Bools:
        counts = self.counts[files]
        known = counts != UNKNOWN
        if (rows < 0).any() or (rows[known] >= counts[known]).any():
            raise ValueError("a row is beyond the end of its file")
        return np.asarray(known)


class PathIndex:
    """Ordinals of files by their paths; holds no more than the paths that are looked up."""

    def __init__(self, paths: pa.ChunkedArray) -> None:
        self._paths = paths

    def find(self, wanted: pa.Array) -> Ints:
        """The ordinal of each of these unique paths, -1 where there is no such file."""
        found = np.full(len(wanted), -1, np.int64)
        start = 0
        while start < len(self._paths) and len(wanted):
            part = self._paths.slice(start, _LOOKUP_CHUNK)
            places: Any = pc.index_in(part, value_set=wanted).combine_chunks()
            there = np.flatnonzero(np.asarray(places.is_valid()))
            found[places.drop_null().to_numpy()] = start + there
            start += len(part)
        return found
