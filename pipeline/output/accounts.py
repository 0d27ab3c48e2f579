"""Counts the rows of samples in an output, to find finished samples and repeated rows.

A sample has one row, or several: one per clip, prompt, or image of a prompt. It is done if all of its rows exist, or if
it failed before it was split into rows. Rows in `data/` take precedence over rows in `errors/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.manifest.done_bitmap import Bools, DoneBitmap, Ints, PathIndex

COLUMNS = (
    *("source", "row_index", "sample_id", "attempt"),
    *("clip_index", "num_clips", "prompt_index", "num_prompts", "replica"),
)
"""Columns of result files that are read to find finished samples."""
_SAMPLE = ["file", "row"]
_ENTRY = pa.schema(
    [(name, pa.int64()) for name in (*_SAMPLE, "place", "num_rows", "attempt")]
    + [("is_error", pa.bool_()), ("sample_id", pa.string())]
)
"""A row of an unfinished sample; `place` is its index among the sample's `num_rows` rows, -1 for a failed sample."""


@dataclass(frozen=True)
class Rows:
    """Result rows with the ordinals of their source files (-1: not in the manifest) and their row indices in them."""

    files: Ints
    rows: Ints
    table: pa.Table


def locate(tables: Sequence[pa.Table], paths: PathIndex) -> list[Rows]:
    """Find the source file and row index of result rows, with one lookup of paths for all tables."""
    encoded = [table["source"].combine_chunks().dictionary_encode() for table in tables]
    unique = pa.chunked_array([column.dictionary for column in encoded], pa.string()).unique()
    ordinals = paths.find(unique)
    located = []
    for table, column in zip(tables, encoded, strict=True):
        files = ordinals[pc.index_in(column.dictionary, value_set=unique).to_numpy()][column.indices.to_numpy()]
        located.append(Rows(files, table["row_index"].to_numpy().astype(np.int64), table))
    return located


class Accounts:
    """Finished and unfinished samples among the added rows; `counts` are the numbers of samples per source file, and
    `rows_per_sample` is None if columns of the rows contain it."""

    def __init__(self, counts: Ints, rows_per_sample: int | None = 1) -> None:
        self.rows_per_sample = rows_per_sample
        self.good = DoneBitmap(counts)
        """Samples that have all of their rows in `data/`."""
        self._bad = DoneBitmap(counts)
        self._open = _ENTRY.empty_table()

    def with_counts(self, counts: Ints) -> Accounts:
        """Return a copy with other numbers of samples per source file; ValueError if a row is beyond its file's end."""
        copy = Accounts(counts, self.rows_per_sample)
        copy.good, copy._bad, copy._open = self.good.with_counts(counts), self._bad.with_counts(counts), self._open
        copy.good.check(*_samples_of(copy._open))
        return copy

    def add(self, parts: Sequence[Rows], is_error: bool = False) -> list[Bools]:
        """Add rows of `data/` files; after all of these, add rows of `errors/` files, newest first.

        Return one mask per part: True for rows that were added before, and for error rows that have a result.
        """
        if self.rows_per_sample != 1:
            sizes = np.cumsum([len(part.files) for part in parts])[:-1]
            entries = pa.concat_tables([self._entries(part, is_error) for part in parts])
            return np.split(self._enter(entries, is_error), sizes)
        if is_error:
            return [self.good.has(part.files, part.rows) | self._bad.add(part.files, part.rows) for part in parts]
        return [self.good.add(part.files, part.rows) for part in parts]

    def done(self, retry_errors: bool = False) -> DoneBitmap:
        """Return the finished samples; with `retry_errors`, samples with errors are not finished."""
        done = DoneBitmap(self.good.counts)
        done.merge(self.good)
        if not retry_errors:
            done.merge(self._bad)
        is_part, attempt = pc.greater_equal(self._open["place"], 0), self._open["attempt"]
        entries = self._open.select([*_SAMPLE, "num_rows"])
        is_there = pc.and_(is_part, pc.invert(self._open["is_error"])) if retry_errors else is_part
        entries = entries.append_column("there", pc.cast(is_there, pa.int64()))
        entries = entries.append_column("got_to", pc.if_else(is_part, attempt, 0))
        entries = entries.append_column("failed_in", pc.if_else(is_part, -1, attempt))
        aggregates = [("num_rows", "max"), ("there", "sum"), ("got_to", "max"), ("failed_in", "max")]
        samples = entries.group_by(_SAMPLE).aggregate(aggregates)
        num_rows = samples["num_rows_max"]
        closed = pc.and_(pc.greater(num_rows, 0), pc.greater_equal(samples["there_sum"], num_rows))
        if not retry_errors:  # an error of the whole sample counts unless a later attempt wrote rows of it
            closed = pc.or_(closed, pc.greater_equal(samples["failed_in_max"], samples["got_to_max"]))
        done.add(*_samples_of(samples.filter(closed)))
        return done

    def present_ids(self, retry_errors: bool = False) -> frozenset[str]:
        """Return the `sample_id` of every row that the output already has for samples with missing rows; a resumed job
        skips these rows. With `retry_errors`, error rows are left out, so they run again."""
        is_open = ~self.done(retry_errors).has(*_samples_of(self._open))
        rows = self._open.filter(pc.and_(pa.array(is_open), pc.greater_equal(self._open["place"], 0)))
        return frozenset((rows.filter(pc.invert(rows["is_error"])) if retry_errors else rows)["sample_id"].to_pylist())

    def _entries(self, rows: Rows, is_error: bool) -> pa.Table:
        def column(name: str) -> Ints:
            if name not in rows.table.column_names:
                return np.full(len(rows.files), -1)
            return np.asarray(rows.table[name].fill_null(-1).to_numpy(), np.int64)

        clip, prompt, replica = column("clip_index"), column("prompt_index"), column("replica")
        num_prompts = np.maximum(column("num_prompts"), 1)
        position = np.where(replica >= 0, replica, np.maximum(clip, 0) * num_prompts + np.maximum(prompt, 0))
        num_rows = np.maximum(column("num_clips"), 1) * num_prompts
        num_rows = np.where(replica >= 0, self.rows_per_sample or 1, num_rows)
        is_whole = np.maximum(np.maximum(clip, prompt), replica) < 0 if is_error else np.zeros(len(position), bool)
        position, num_rows = np.where(is_whole, -1, position), np.where(is_whole, 0, num_rows)
        errors, ids = np.full(len(position), is_error), rows.table["sample_id"]
        return pa.table([rows.files, rows.rows, position, num_rows, column("attempt"), errors, ids], schema=_ENTRY)

    def _enter(self, entries: pa.Table, is_error: bool) -> Bools:
        repeated = self.good.has(*_samples_of(entries))
        fresh = np.flatnonzero(~repeated)
        errors = self._open["is_error"]
        before = self._open if is_error else self._open.filter(pc.invert(errors))
        after = _ENTRY.empty_table() if is_error else self._open.filter(errors)  # a result replaces an error
        num_before = before.num_rows
        both = pa.concat_tables([before, entries.take(fresh), after])
        both = both.append_column("index", pa.array(np.arange(both.num_rows)))
        firsts = both.group_by([*_SAMPLE, "place"]).aggregate([("index", "min")])["index_min"]
        counts_no_more = np.ones(both.num_rows, bool)
        counts_no_more[firsts.to_numpy()] = False
        both = both.filter(pa.array(~counts_no_more))
        counts_no_more[_beaten(both, num_before)] = True
        repeated[fresh] = counts_no_more[num_before : num_before + len(fresh)]
        samples = both.group_by(_SAMPLE).aggregate([("is_error", "any"), ("place", "count"), ("num_rows", "max")])
        is_complete = pc.greater_equal(samples["place_count"], samples["num_rows_max"])
        self.good.add(*_samples_of(samples.filter(pc.and_(is_complete, pc.invert(samples["is_error_any"])))))
        self._open = both.filter(pa.array(~self.good.has(*_samples_of(both)))).drop_columns("index")
        return repeated


def _beaten(entries: pa.Table, first: int) -> Ints:
    """Return the `index` of each new error (from `first` on) of a whole sample that earlier entries complete, or of
    which a later attempt wrote rows."""
    is_part = pc.greater_equal(entries["place"], 0)
    sample_errors = entries.filter(pc.and_(pc.invert(is_part), pc.greater_equal(entries["index"], first)))
    sample_errors = sample_errors.select([*_SAMPLE, "index", "attempt"])
    parts = entries.filter(is_part).select([*_SAMPLE, "index", "attempt", "num_rows"])
    pairs = sample_errors.join(parts, _SAMPLE, join_type="inner", right_suffix="_of_part")
    pairs = pairs.filter(pc.less(pairs["index_of_part"], pairs["index"]))
    aggregates = [("index_of_part", "count"), ("num_rows", "max"), ("attempt_of_part", "max")]
    groups = pairs.group_by(["index", "attempt"]).aggregate(aggregates)
    is_complete = pc.greater_equal(groups["index_of_part_count"], groups["num_rows_max"])
    later = pc.greater(groups["attempt_of_part_max"], groups["attempt"])
    return np.asarray(groups.filter(pc.or_(is_complete, later))["index"].to_numpy(), np.int64)


def _samples_of(entries: pa.Table) -> tuple[Ints, Ints]:
    return entries["file"].to_numpy(), entries["row"].to_numpy()
