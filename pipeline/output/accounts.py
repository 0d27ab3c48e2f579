"""Counts the rows of samples in an output: finished samples, and rows that are there twice.

A sample is one row, or several: clips, prompts, images of one prompt. It is done when all of them are there, or when it
failed before it became several. Rows in `data/` win over rows in `errors/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.source.done_bitmap import Bools, DoneSet, Ints, PathIndex

PLACES = ("clip_index", "num_clips", "prompt_index", "num_prompts", "replica")
COLUMNS = ("source", "row_index", "sample_id", "attempt", *PLACES)
"""The columns of an output that are read to find finished samples."""


@dataclass(frozen=True)
class Rows:
    """Where some result rows belong: file ordinals and row indices, and the table with the other columns."""

    files: Ints
    rows: Ints
    table: pa.Table


def locate(tables: list[pa.Table], paths: PathIndex) -> list[Rows]:
    """Where the rows of these tables belong; files that the manifest does not know are -1."""
    encoded = [table["source"].combine_chunks().dictionary_encode() for table in tables]
    unique = pa.chunked_array([one.dictionary for one in encoded], pa.string()).unique() if encoded else pa.array([])
    ordinals = paths.find(unique)
    places = {path: int(ordinal) for path, ordinal in zip(unique.to_pylist(), ordinals.tolist(), strict=True)}
    found = []
    for table, one in zip(tables, encoded, strict=True):
        own = np.array([places[path] for path in one.dictionary.to_pylist()], np.int64)
        files = own[one.indices.to_numpy(zero_copy_only=False)] if table.num_rows else np.zeros(0, np.int64)
        found.append(Rows(files, table["row_index"].to_numpy().astype(np.int64), table))
    return found


class Accounts:
    """The entries so far. `rows_per_sample` is a number, or None if the rows' own columns contain it."""

    def __init__(self, counts: Ints, rows_per_sample: int | None = 1) -> None:
        self._rows_per_sample = rows_per_sample
        self.good = DoneSet(counts)
        """Samples all of whose rows are in `data/`."""
        self._bad = DoneSet(counts)
        self._open: dict[tuple[int, int], _Open] = {}

    def add_good(self, rows: Rows) -> Bools:
        """Enter rows of `data/`; returns which of them are there already."""
        if self._rows_per_sample == 1:
            return self.good.add(rows.files, rows.rows)
        return self._add_each(rows, is_error=False)

    def add_bad(self, rows: Rows) -> Bools:
        """Enter rows of `errors/`, after all of `data/`; returns which of them no longer count, because the row has
        a result, or another error that was entered before."""
        if self._rows_per_sample == 1:
            return self.good.has(rows.files, rows.rows) | self._bad.add(rows.files, rows.rows)
        return self._add_each(rows, is_error=True)

    def done(self, retry_errors: bool = False) -> DoneSet:
        """The samples that need nothing more; with `retry_errors` none that has failed."""
        done = DoneSet(self.good.counts)
        done.merge(self.good)
        if self._rows_per_sample == 1:
            if not retry_errors:
                done.merge(self._bad)
            return done
        closed = [place for place, sample in self._open.items() if sample.is_done(retry_errors)]
        done.add(np.array([file for file, _ in closed], np.int64), np.array([row for _, row in closed], np.int64))
        return done

    def present_ids(self, retry_errors: bool = False) -> frozenset[str]:
        """Rows of samples that are not done which are there all the same, and must not be made again."""
        return frozenset(
            sample_id
            for sample in self._open.values()
            if not sample.is_done(retry_errors)
            for sample_id in (sample.good if retry_errors else {**sample.good, **sample.bad}).values()
        )

    def _add_each(self, rows: Rows, is_error: bool) -> Bools:
        names = rows.table.column_names
        blank = [None] * rows.table.num_rows
        columns = {name: rows.table[name].to_pylist() if name in names else blank for name in COLUMNS[2:]}
        repeated = self.good.has(rows.files, rows.rows)
        for place, own in enumerate(zip(*columns.values(), strict=True)):
            if repeated[place]:
                continue
            row = dict(zip(columns, own, strict=True))
            key = int(rows.files[place]), int(rows.rows[place])
            sample = self._open.setdefault(key, _Open(self._rows_per_sample))
            repeated[place] = sample.add(row, is_error)
            if sample.is_complete(with_bad=False) and not sample.bad and sample.failed_in is None:
                del self._open[key]
                self.good.add(np.array([key[0]]), np.array([key[1]]))
        return repeated


@dataclass
class _Open:
    """A sample that lacks rows, or has failed in part or wholly."""

    rows_per_sample: int | None
    good: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    """Ids by the row's place among those of the sample."""
    num_rows: int = 0
    """The number of rows of the sample; 0 until a row contains it."""
    failed_in: int | None = None
    """The attempt in which it failed before it became several rows."""
    newest: int = 0

    def add(self, row: dict[str, Any], is_error: bool) -> bool:
        """Enter a row; whether it is there already or counts no more."""
        alone = row["clip_index"] is None and row["prompt_index"] is None and row["replica"] is None
        if is_error and alone:
            beaten = self.is_complete() or self.newest > row["attempt"] or self.failed_in is not None
            self.failed_in = max(self.failed_in or 0, row["attempt"])
            return beaten
        if row["replica"] is not None:
            place, self.num_rows = row["replica"], self.rows_per_sample or 1
        else:
            num_prompts = row["num_prompts"] or 1
            place = (row["clip_index"] or 0) * num_prompts + (row["prompt_index"] or 0)
            self.num_rows = (row["num_clips"] or 1) * num_prompts
        if place in self.good or (is_error and place in self.bad):
            return True
        (self.bad if is_error else self.good)[place] = row["sample_id"]
        self.newest = max(self.newest, row["attempt"])
        return False

    def is_complete(self, with_bad: bool = True) -> bool:
        """Whether every row is there."""
        there = self.good.keys() | (self.bad.keys() if with_bad else set())
        return bool(self.num_rows) and len(there) >= self.num_rows

    def is_done(self, retry_errors: bool) -> bool:
        """Whether nothing is left to do: a failure of the whole counts where no later attempt got further."""
        if self.is_complete(with_bad=not retry_errors):
            return True
        return not retry_errors and self.failed_in is not None and self.failed_in >= self.newest
