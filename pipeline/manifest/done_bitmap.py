"""Records finished samples in a bitmap with one bit per sample of a manifest, and finds files by path.

Sample `row` of file `file` has the ordinal `starts[file] + row`. Each file of unknown count has a separate bitmap
that grows.
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
_COPY_BYTES = 1 << 17
"""Bytes of a bitmap that are copied at a time, which takes 16 MB at most."""


class DoneBitmap:
    """A set of (file, row); `counts` is the number of samples of every file, or `UNKNOWN`.

    Methods raise ValueError for a row beyond the end of its file.
    """

    def __init__(self, counts: Ints) -> None:
        self.counts = counts
        self._starts = np.concatenate([[0], np.cumsum(np.maximum(counts, 0), dtype=np.int64)])
        self._bits = np.zeros((int(self._starts[-1]) + 7) // 8, np.uint8)
        self._open: dict[int, Bools] = {}
        self._counted: Ints | None = None

    @classmethod
    def all_but(cls, counts: Ints, files: Ints, rows: Ints) -> DoneBitmap:
        """Return the set of all samples but these; of a file of unknown count, the samples before the last of these."""
        others, result = cls(counts), cls(counts)
        others.add(files, rows)
        result._bits = ~others._bits
        if unused := -int(result._starts[-1]) % 8:
            result._bits[-1] &= (1 << (8 - unused)) - 1
        result._open = {file: ~bits[: np.flatnonzero(bits)[-1] + 1] for file, bits in others._open.items()}
        return result

    def __len__(self) -> int:
        return int(np.bitwise_count(self._bits).sum(dtype=np.int64)) + sum(int(b.sum()) for b in self._open.values())

    def add(self, files: Ints, rows: Ints) -> Bools:
        """Add samples; return for each whether it was already in the set or occurs earlier in this call."""
        is_counted = self.check(files, rows)
        repeated = np.zeros(len(files), bool)
        ordinals = self._starts[files[is_counted]] + rows[is_counted]
        again = np.ones(len(ordinals), bool)
        if (np.diff(ordinals) > 0).all():  # usual, and saves the sort
            unique, first = ordinals, np.arange(len(ordinals))
        else:
            unique, first = np.unique(ordinals, return_index=True)
        again[first] = self._get(unique)
        repeated[is_counted] = again
        if len(unique):
            bytes_changed, firsts = np.unique(unique >> 3, return_index=True)
            self._bits[bytes_changed] |= np.bitwise_or.reduceat(np.left_shift(1, unique & 7).astype(np.uint8), firsts)
        for index in np.flatnonzero(~is_counted):
            file, row = int(files[index]), int(rows[index])
            bits = self._open_bits(file)
            if row >= len(bits):
                bits = _extended(bits, max(row + 1, 2 * len(bits)))
            repeated[index] = bits[row]
            bits[row] = True
            self._open[file] = bits
        self._counted = None
        return repeated

    def has(self, files: Ints, rows: Ints) -> Bools:
        is_counted = self.check(files, rows)
        is_done = np.zeros(len(files), bool)
        is_done[is_counted] = self._get(self._starts[files[is_counted]] + rows[is_counted])
        for index in np.flatnonzero(~is_counted):
            bits = self._open_bits(int(files[index]))
            is_done[index] = rows[index] < len(bits) and bits[rows[index]]
        return is_done

    def is_inside(self, files: Ints, rows: Ints) -> Bools:
        """Return for each whether `file` is a file (-1 is none) and has a row with this index, as far as is known."""
        counts = self.counts[files]
        return np.asarray((files >= 0) & (rows >= 0) & ((counts == UNKNOWN) | (rows < counts)))

    def with_counts(self, counts: Ints) -> DoneBitmap:
        """Return a copy with other numbers of samples; `counts` begins with the same files.

        Raises:
            ValueError: a row of the set is beyond the end of its file.
        """
        copy = DoneBitmap(counts)
        if np.array_equal(counts, self.counts):
            copy._bits = self._bits.copy()
        else:
            for first in range(0, len(self._bits), _COPY_BYTES):
                bits = np.unpackbits(self._bits[first : first + _COPY_BYTES], bitorder="little")
                ordinals = 8 * first + np.flatnonzero(bits)
                files = np.searchsorted(self._starts, ordinals, side="right") - 1
                copy.add(files, ordinals - self._starts[files])
        for file, row_bits in self._open.items():
            rows = np.flatnonzero(row_bits)
            copy.add(np.full(len(rows), file), rows)
        return copy

    def merge(self, other: DoneBitmap) -> None:
        self._bits |= other._bits
        for file, bits in other._open.items():
            own_bits, size = self._open_bits(file), max(len(bits), len(self._open_bits(file)))
            self._open[file] = _extended(own_bits, size) | _extended(bits, size)
        self._counted = None

    def rows(self, file: int, start: int, stop: int | None) -> Bools:
        """Return for each row from `start` to `stop` of a file whether it is in the set.

        If `stop` is None and the file's count is unknown, the result ends at the file's last row in the set.
        """
        if self.counts[file] == UNKNOWN:
            bits = self._open_bits(file)
            stop = int(np.flatnonzero(bits)[-1]) + 1 if stop is None and bits.any() else stop or 0
            return _extended(bits[start:stop], max(0, stop - start))
        end = int(self.counts[file]) if stop is None else stop
        return self._get(self._starts[file] + np.arange(start, end))

    def is_complete(self, file: int, start: int = 0, stop: int | None = None) -> bool:
        """Return whether all samples of a file from `start` to `stop` are in the set; False if its count is unknown."""
        return self.counts[file] != UNKNOWN and bool(self.rows(file, start, stop).all())

    def num_in(self, files: Ints, starts: Ints, stops: Ints) -> Ints:
        """Return how many samples of each piece are in the set; 0 for pieces of files of unknown count."""
        if self._counted is None:
            self._counted = np.concatenate([[0], np.cumsum(np.bitwise_count(self._bits), dtype=np.int64)])
        counted, padded = self._counted, np.append(self._bits, np.uint8(0))

        def num_before(ordinals: Ints) -> Ints:
            byte = np.minimum(ordinals >> 3, len(self._bits))
            rest = padded[byte] & (np.left_shift(1, ordinals & 7) - 1).astype(np.uint8)
            return np.asarray(counted[byte] + np.bitwise_count(rest))

        is_counted = self.counts[files] != UNKNOWN
        low, high = self._starts[files] + starts, self._starts[files] + np.where(stops < 0, self.counts[files], stops)
        return np.where(is_counted, num_before(high) - num_before(np.minimum(low, high)), 0)

    def _open_bits(self, file: int) -> Bools:
        return self._open.get(file, np.zeros(0, bool))

    def _get(self, ordinals: Ints) -> Bools:
        bits: Bools = (self._bits[ordinals >> 3] >> (ordinals & 7).astype(np.uint8) & 1).astype(bool)
        return bits

    def check(self, files: Ints, rows: Ints) -> Bools:
        """Check that every row is inside its file (else ValueError); return which of the files have a known count."""
        counts = self.counts[files]
        is_counted = counts != UNKNOWN
        if (rows < 0).any() or (rows[is_counted] >= counts[is_counted]).any():
            raise ValueError("a row is beyond the end of its file")
        return np.asarray(is_counted)


def _extended(bits: Bools, size: int) -> Bools:
    return np.concatenate([bits, np.zeros(size - len(bits), bool)])


class PathIndex:
    """Maps file paths to ordinals; a lookup uses memory for the requested paths only."""

    def __init__(self, paths: pa.ChunkedArray) -> None:
        self._paths = paths

    def find(self, paths: pa.Array) -> Ints:
        """Return the ordinal of each of these unique paths; -1 if there is no such file."""
        ordinals = np.full(len(paths), -1, np.int64)
        for first in range(0, len(paths), _LOOKUP_CHUNK):
            values = paths.slice(first, _LOOKUP_CHUNK)
            for start in range(0, len(self._paths), _LOOKUP_CHUNK):
                part = self._paths.slice(start, _LOOKUP_CHUNK)
                matches: Any = pc.index_in(part, value_set=values).combine_chunks()
                positions = np.flatnonzero(np.asarray(matches.is_valid()))
                ordinals[first + matches.drop_null().to_numpy()] = start + positions
        return ordinals
